"""Runs a bad step again to find the module, the op, the line and the sample that it came from."""
