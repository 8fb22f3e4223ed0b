"""Decides: signals in, plans out. Never imports torch, starts no process.

The rooms, each importing only those before it: `base` (types, config, errors, durable files), `detectors` (signal to
finding), `record` (journal, metrics, run.json, quarantine), `checkpoints` (checkpoints on disk), `decide` (findings to
verdict, verdict to plan).
"""
