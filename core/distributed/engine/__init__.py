"""What an engine is, and what both engines share.

engine            the interface: parameters, gradients, checks before a step, memory
owners            the wrapper of a parameter, as optimizers find it
gradients         the gradient that an optimizer reads, and ``param.grad`` where it cannot be read there
bucket_reduction  reduces flat gradients over ranks
gathered_units    which units to gather ahead, whether gathered ones were written, what neighbouring ranks keep
gradient_tree     sums of micro-batches in a fixed order
"""
