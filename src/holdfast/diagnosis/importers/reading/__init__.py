"""Turns bytes into numbers: files, lines, columns, events. Knows no log format; formats/ builds on it."""
