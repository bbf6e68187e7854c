"""Plants faults in a copy of `core`, one at a time; the suite has to catch every one: `make mutation`."""
