"""Breaks things on purpose: `faults/`, each injected where it arises, and `storm`, several of them in one run."""
