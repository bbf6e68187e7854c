"""Faults planted in a copy of `core`, one at a time, of which the suite has to catch every one: `make mutation`."""
