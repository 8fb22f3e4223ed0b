"""Checkpoints on disk: manifest, health, lineage, retention, and the choice of the one to resume from. No torch."""
