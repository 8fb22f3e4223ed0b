"""The trainer that ships: a small, real language-model trainer that uses Guard as any user would.

`config` (its sections), `layout` (how ranks share a run), `model` (the transformer), `parallel` (the model over several
ranks), `ranks` (the processes), `tokens` (token files and the embedded data set), `mixture` (which sequence comes when),
`stages` (where its weights change), `prepare` (text into token files), `trainer` (the schedule and the loop, from top to
bottom), `watch` (evaluation, speed, the result), `interrupts` (Ctrl-C), `progress` (what a person sees).
"""
