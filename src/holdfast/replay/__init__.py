"""Bundles of incidents: written while a run trains, and run again by `holdfast replay` on any machine."""
