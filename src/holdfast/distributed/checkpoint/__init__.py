"""Checkpoints on disk, of one rank or many: tensors through torch.distributed.checkpoint, all else as JSON of our own."""
