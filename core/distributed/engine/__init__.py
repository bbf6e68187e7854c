"""What an engine is, and what both engines share.

engine          the interface: parameters, gradients, memory; the wrapper of a parameter
gradients       the gradient that an optimizer reads, and how flat gradients are reduced over ranks
gathered_units  which units to gather ahead, whether gathered ones were written, what neighbouring ranks keep
gradient_tree   sums of micro-batches in a fixed order
"""
