"""What models share."""
