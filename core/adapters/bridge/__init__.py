"""What adapters share: meshes, units, wrappers for another library's settings, a trained model, and checkpoints.

meshes       which ranks a model is replicated and sharded over, by the names of a mesh's axes
units        which modules are gathered together, by class, by name or by size
translation  tables of another library's settings, the wrapper that they become, and the versions that are known
trained      one reduction a step; the norm of the whole gradient, and clipping by it; the step, and its optimizer
checkpoints  a trained model and its optimizer in a folder that any sharding continues from
"""
