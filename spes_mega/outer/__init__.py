"""The SPES outer loop as pure functions of tensors: ownership, averaging, expert merging, codecs."""
