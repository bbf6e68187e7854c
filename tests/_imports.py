# ruff: noqa: F401
"""Imports what processes of tests need, before they are forked, and does once what each of them would do again.

Nothing here starts a thread or joins a group.
"""

import gc
import importlib
import io
from contextlib import suppress

import matplotlib.backends.backend_agg
import matplotlib.figure
import PIL.Image
import pytest
import safetensors.torch
import tokenizers.trainers
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor.debug
import torch.utils.tensorboard

import core.dist_checkpointing.foreign_layout
import core.distributed
import core.models.gpt.hugging_face
import core.optimizer
import core.training.config.arguments
import core.training.launch.entry
import core.training.loop
import core.training.state
import core.verify

# The documentation of flags, which is read from source code, and the fonts of a picture.
REQUIRED = ("num-layers", "hidden-size", "num-attention-heads", "seq-length", "micro-batch-size", "train-iters", "lr")
with suppress(ImportError):  # a machine with a GPU may lack cyclopts
    core.training.config.arguments.parse_arguments([f"--{name}=1" for name in REQUIRED])
matplotlib.figure.Figure().subplots().figure.savefig(io.BytesIO())

for name in ("transformers.trainer", "accelerate"):  # two seconds in each rank that uses them
    with suppress(Exception):  # of another version than ours, it may fail in any way
        importlib.import_module(name)

gc.set_threshold(20_000, 20, 20)  # with the defaults a twentieth of a test's time is spent on looking for garbage
gc.freeze()  # half a million objects, at which no collection in a fork has to look again
