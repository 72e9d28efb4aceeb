"""Files that hold tensors: safetensors and torch archives, read and written in parts."""
