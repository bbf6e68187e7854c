"""Checks and prepares a model before it is sharded.

unfit_models     rejects models that no wrapper takes, wrapped or changed ones, and ranks with different models
initial_values   makes the values of all ranks equal, and keeps attributes of parameters that torch replaces
unit_transforms  recomputation and compilation of units, packed weights, parameters that settings leave out
"""
