"""What adapters share: meshes, units, the choice of a wrapper, a trained model, optimizers, checkpoints and versions.

meshes       which ranks a model is replicated and sharded over, by the names of a mesh's axes
units        which modules are gathered together, by class, by name or by size
wrapping     builds the wrapper for a trainer's settings, by a table of translations
trained      one reduction a step; the norm of the whole gradient, and clipping by it; the step
optimizers   torch's optimizers as settings of `core.optimizer`, with the groups of the user's
checkpoints  a trained model and its optimizer in a folder that any sharding continues from
versions     the supported versions of the systems that need an extra
"""
