"""Faults, one per file, injected at a step where they would arise. Each is injected once; bad data stays in the data."""
