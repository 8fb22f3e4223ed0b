"""The command line: one file per command, put together in `main`.

A command parses its arguments, calls the packages below and prints. It raises HoldfastError for a user's mistake;
`main.run` turns that into a message and an exit status.
"""
