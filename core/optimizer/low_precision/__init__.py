"""Optimizer state and masters in 8 and 16 bits, whose bits do not depend on how tensors are cut over ranks."""
