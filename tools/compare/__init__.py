"""The comparison: `python -m tools.compare --help`."""
