"""The invariants on a GPU: `python -m benchmarks.gpu.smoke`."""
