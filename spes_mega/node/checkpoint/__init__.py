"""What a node keeps on its disk in order to resume."""
