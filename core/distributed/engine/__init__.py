"""What an engine is, and what both engines share.

engine            the interface: parameters, gradients, memory; and the wrapper of a parameter, as optimizers find it
gradients         the gradient that an optimizer reads, also where ``param.grad`` cannot be read, and its reduction
gathered_units    which units to gather ahead, whether gathered ones were written, what neighbouring ranks keep
gradient_tree     sums of micro-batches in a fixed order
"""
