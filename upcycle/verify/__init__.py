"""Source and result run side by side."""
