"""What agreeing costs as the number of ranks grows: `python -m benchmarks.ranks.growth`."""
