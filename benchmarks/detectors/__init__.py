"""A benchmark that scores any detector, this project's own and the published rules alike.

    python -m benchmarks.detectors --quick                      a look, on the tuning seeds
    python -m benchmarks.detectors --check --plot sweep.svg     the claim, on the frozen test seeds; exit status 1 if not met
    python -m benchmarks.detectors --only generated --detector holdfast

Four parts: generated curves (`clean`, `anomalies`), labelled real logs (`corpus`), controlled runs of the reference model
(`runs`), and what a step costs (`cost`). A detector is anything with `run(curve) -> alarms` (`alarms`); the published
rules are in `rules`. Skips and rollbacks are scored apart, thresholds are swept, rates have intervals (`scoring`).

What it cannot show:
- On a record nothing is healed. Online a vetoed step never enters the course, and a rollback ends the event.
- Generated events are cleaner than real ones: one shape of spike with few parameters, on a course without one; anomalies
  of the bars happen on language-model courses only, and `hard_spike` and `hard_divergence`, which happen on the others, are
  scaled by what was seen lately, so that they are far out by making.
- False alarms are per step over all clean kinds alike. Real runs are not drawn from these kinds in these shares.
- The rules see what their authors made them for and all the rest, with declared shifts kept from them, since they have no
  way to be told. Costly rules are charged PaLM's 100 steps for going back; what their users really lose is not known.
- Update sizes, weight norms and batch fingerprints are in the controlled runs, where measured, and not in generated curves.
"""
