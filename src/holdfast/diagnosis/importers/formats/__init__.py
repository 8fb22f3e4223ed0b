"""One module for each log format, with its name, description, detection and reader."""
