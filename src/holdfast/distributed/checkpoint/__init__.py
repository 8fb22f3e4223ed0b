"""Writes and reads checkpoints on disk, for one rank or many: tensors as raw bytes, all other state as JSON."""
