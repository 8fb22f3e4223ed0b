"""Measures the cost of agreement as the number of ranks grows: `python -m benchmarks.ranks.growth`."""
