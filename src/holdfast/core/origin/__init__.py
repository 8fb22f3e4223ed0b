"""The origin of a bad step: what a replay found, and the verdict that follows from it. No torch."""
