"""What adapters share: meshes, units, the choice of a wrapper, gradients of a step, optimizers and versions.

meshes       which ranks a model is replicated and sharded over, by the names of a mesh's axes
units        which modules are gathered together, by class, by name or by size
wrapping     builds the wrapper for a trainer's settings, by a table of translations
gradients    one reduction a step; the norm of the whole gradient, and clipping by it
optimizers   torch's optimizers as settings of `core.optimizer`, with the groups of the user's
versions     the supported versions of the systems that need an extra
"""
