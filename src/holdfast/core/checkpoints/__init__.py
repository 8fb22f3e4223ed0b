"""What a checkpoint on disk is: its manifest, its health, its lineage, and which of them a run goes on from. No torch."""
