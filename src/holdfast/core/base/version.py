"""The version, readable by every layer."""

__version__ = "0.1.0"
