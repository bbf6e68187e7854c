"""Views a rank's piece of a tensor as a piece of the whole model's tensor: shapes and offsets, without copies."""
