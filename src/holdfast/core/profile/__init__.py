"""Reads profiler traces, sorts their time into categories, compares two of them and names the cause of a slowdown."""
