"""Decides. Signals in, plans out; never imports torch.

The pipeline, in the order it runs: `types` (the words), `config` (the written policy), `detectors/` (signal to
finding), `verdict` (findings to one verdict), `policy` (verdict to plan), `engine` (all of these in a row), with
`journal`, `rundir` and `incidents` (what is written down) beside them, and `ports` (what a higher layer supplies).
"""
