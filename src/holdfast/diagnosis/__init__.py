"""Explains a run from what it left behind: importers/ read it, the tree asks, the post-mortem tells. Never needs torch."""
