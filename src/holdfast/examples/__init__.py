"""Examples to run and copy: `python -m holdfast.examples.loop`, `torchrun --nproc-per-node 4 -m holdfast.examples.ranks`."""
