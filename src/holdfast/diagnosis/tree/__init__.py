"""The decision tree: `tree.toml` defines it, `load` checks it, `questions` answer from a log, `walk` descends it."""
