"""What adapters share: meshes and units, wrappers for another library's settings, a trained model, and checkpoints.

sharding     which ranks a model is sharded over, by a mesh's axes, and which modules are gathered together
translation  tables of another library's settings, the wrapper that they become, and the versions that are known
trained      one reduction a step; the norm of the whole gradient, and clipping by it; the step, and its optimizer
checkpoints  a trained model and its optimizer in a folder that any sharding continues from
"""
