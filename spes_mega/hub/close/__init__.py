"""Closing a round: the mean over nodes, the outer optimizer, merging of experts."""
