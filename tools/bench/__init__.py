"""Speed and memory: `python -m tools.bench --help`."""
