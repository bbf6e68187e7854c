"""Exposes runs to faults at random moments: ``python -m tests.drill --minutes 10``."""
