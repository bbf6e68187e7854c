"""Gradients on flat buffers, for replicas and for units of sharded parameters.

flat_memory, param_and_grad_buffer  own the memory; grad_memory keeps it between uses
bucket, grad_slot                   a part of it, and one parameter's place there
life_cycle                          the states of both
bucket_group, reduction             the collectives of a bucket; layers compute gradients in its memory
schedule                            when buckets leave
bucket_sums                         sums over micro-batches in a tree
pending_parameters, forward_hooks   readers wait for parameters that are being gathered
param_placement                     notices parameters that have left the memory
shown_gradients, unreadable_gradient  what ``param.grad`` is
"""
