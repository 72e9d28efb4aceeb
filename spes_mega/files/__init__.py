"""Files on the disk of whoever runs this: read within bounds, made durable, locked."""
