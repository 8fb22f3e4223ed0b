"""Communicates between ranks through torch.distributed, and writes and reads checkpoints on disk."""
