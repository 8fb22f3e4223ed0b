"""Communicates: what needs torch.distributed, and the checkpoints on disk."""
