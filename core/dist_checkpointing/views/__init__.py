"""A rank's piece of a tensor, seen as the piece that it is of the whole model's tensor: shapes, offsets, no copies."""
