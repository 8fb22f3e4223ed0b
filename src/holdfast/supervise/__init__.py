"""Watches the processes of a run from outside of them. The sidecar imports no torch."""
