"""The command line: one file a command, `main` puts them together.

A command reads what the user typed, calls the layers below, and prints. It raises HoldfastError for what the user can
mend; `main.run` turns that into a message and an exit status.
"""
