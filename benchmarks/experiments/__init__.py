"""Real training through the Guard on a CPU: clean runs that must not be harmed, and faults that must be healed.

    python -m benchmarks.experiments.clean  [--kinds gan,dqn] [--seeds 5] [--steps 4000] [--folder F] [--json FILE]
    python -m benchmarks.experiments.faults [--models lm,cnn,mlp] [--faults bit_flip] [--seeds 5] [--folder F] [--json FILE]

`training` runs one loop guarded or unguarded and reads the record. `workloads` has the clean kinds, `held_back` those to be
run once at the end (`clean --held-back`), `tasks` the models of the fault matrix. The seeds are frozen. Both programs exit
with status 1 if a bar of theirs is missed. `--folder` keeps the run directories.
"""
