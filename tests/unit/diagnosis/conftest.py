"""Puts this folder on the path, so that its sub-folders and tests/unit/reports can import the synthetic runs."""
