"""The guard inside trainers that own their loop: one file for each, imported on first use."""
