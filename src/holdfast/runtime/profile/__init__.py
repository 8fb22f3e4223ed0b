"""Profile a few steps on demand, and find out why steps have become slower."""
