"""A benchmark that scores any detector: those of this project and published rules.

    python -m benchmarks.detectors --quick                      a first result, on the tuning seeds
    python -m benchmarks.detectors --check --plot sweep.svg     the bars, on the frozen test seeds; exit status 1 if not met
    python -m benchmarks.detectors --only generated --detector holdfast

Five parts: generated curves (`clean`, `anomalies`), labelled real logs (`corpus`), controlled runs of the reference model
(`runs`), clean losses of real loops such as GANs and RL (`loops`), and the cost of a step (`cost`). A detector is anything
with `run(curve) -> alarms` (`alarms`); the published rules are in `rules`. Skips and rollbacks are scored separately,
thresholds are swept, rates have intervals (`scoring`).

What it cannot show:
- A recorded run is not repaired. In a live run a vetoed step never enters the baseline, and a rollback ends the event.
- Generated events are cleaner than real ones: one shape of spike with few parameters. The anomalies of the bars are on
  language-model runs only. `hard_spike` and `hard_divergence` are on the other kinds; they are scaled by the recent noise,
  so that they are always far outside it.
- False alarms are counted per step over all clean kinds equally. Real runs do not have these kinds in these shares.
- The rules see all kinds, not only those they were made for. They have no input for declared shifts. A costly rule is
  charged PaLM's 100 steps for a rollback; the real loss of its users is unknown.
- Update sizes, weight norms and batch fingerprints are in the controlled runs only, not in generated curves.
"""
