# ruff: noqa: F401
"""Imports what processes of tests need, before they are forked. No import here starts a thread or joins a group."""

import gc

import matplotlib.backends.backend_agg
import matplotlib.figure
import pytest
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.utils.tensorboard

import core.distributed
import core.models.gpt
import core.optimizer
import core.training.arguments
import core.training.loop
import core.verify

gc.freeze()  # half a million objects, at which no collection in a fork has to look again
