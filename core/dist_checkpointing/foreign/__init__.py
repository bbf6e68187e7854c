"""Checkpoints of other projects: their files (safetensors), and their names and cuts of tensors."""
