"""Gradients on flat buffers, for replicas and for units of sharded parameters.

flat_memory, param_and_grad_buffer  own the memory; grad_memory keeps it between uses
bucket, grad_slot                   a part of a buffer, and one parameter's place in it
life_cycle                          the states of a bucket and of a parameter's gradient
bucket_group, reduction             the collectives of a bucket; layers compute gradients in its memory
schedule                            when buckets are sent
bucket_sums                         sums over micro-batches in a tree
forward_hooks                       makes readers wait for parameters that are being gathered
param_placement                     detects parameters that no longer use the buffer's memory
shown_gradients                     set ``param.grad``
"""
