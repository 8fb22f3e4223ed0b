"""The reference trainer: a small, real language-model trainer that uses Guard as any user would.

`config` (sections and validation), `trainer` (the training loop, from top to bottom), `model` (the transformer), `tokens`
(token files and the embedded data set), `mixture` (data order), `prepare` (text to token files), `layout`, `ranks` and
`parallel` (several ranks), `progress` (terminal output).
"""
