"""Checks and prepares a model before it is sharded, and checks its gradients.

unfit_models, rewrapping, expert_parameters  reject models that no wrapper takes
same_model                                   rejects ranks with different models
initial_values, broadcast                    make the values of all ranks equal
unit_transforms, compilation                 recomputation and compilation
parameter_attributes, forward_methods        attributes that sharding keeps, methods that gather
gradient_checks                              gradients that are not finite, or far too large
"""
