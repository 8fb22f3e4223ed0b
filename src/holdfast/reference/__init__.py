"""The trainer that ships: a small, real language-model trainer that uses Guard as any user would.

`config` (its sections), `model` (the transformer), `tokens` (token files and the embedded data set), `mixture` (which
sequence comes when), `prepare` (text into token files), `trainer` (the schedule and the loop, from top to bottom),
`progress` (what a person sees).
"""
