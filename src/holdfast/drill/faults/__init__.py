"""Faults, one file each, injected at their source, at a step. Each strikes once; a fault in the data stays in the data."""
