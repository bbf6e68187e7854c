"""Reads and writes checkpoints of other projects: their files (safetensors), their names and layouts of tensors."""
