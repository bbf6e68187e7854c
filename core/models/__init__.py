"""Models built from `core.transformer`."""
