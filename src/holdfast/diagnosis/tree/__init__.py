"""The decision tree: `tree.toml` holds it, `load` checks it, `questions` answer from a log, `walk` goes down it."""
