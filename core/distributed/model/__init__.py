"""Prepares a model before it is sharded, and puts hooks around its forwards.

forward_hooks          what a wrapper does around forwards and other methods, and what backward reads of a freed unit
initial_values         makes the values of all ranks equal, and keeps attributes of parameters that torch replaces
offloaded_activations  keeps activations of units in host memory until backward is near
unit_transforms        recomputation and compilation of units, packed weights, parameters that settings leave out
"""
