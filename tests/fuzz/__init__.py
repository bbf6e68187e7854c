"""Hostile variants of every file that is read: ``python -m tests.fuzz --minutes 10``."""
