"""Reports for people: a diagnosis or a post-mortem, in the terminal or as markdown."""
