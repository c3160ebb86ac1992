"""Trains the small hybrid model that forkpoint ships: `python -m train --help`."""
