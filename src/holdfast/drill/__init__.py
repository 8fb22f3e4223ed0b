"""Injects faults on purpose: `faults/` holds one fault per file, `fault_schedule` runs several, `demo` shows them."""
