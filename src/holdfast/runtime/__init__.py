"""Touches tensors: senses a step, gates its update, holds the state, the data and the snapshots, performs the effects.

Never imports torch.distributed. In the order a step meets them: `loop` and `data/` (serve it), `step` (the user's side
of it), `sensing` and `gate` (measure it, let it land or not), `settle` (find out what became of it), `effects/` (what is
done about it), `state`, `rng`, `buffers` and `snapshots/` (what can be returned to). `run` holds these together; `guard`
is what the user sees.
"""
