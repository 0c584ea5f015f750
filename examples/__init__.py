"""Small programs, one idea each: `python -m examples.NAME --help`."""
