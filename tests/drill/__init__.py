"""Runs that meet every fault that a month brings, in minutes: ``python -m tests.drill --minutes 10``."""
