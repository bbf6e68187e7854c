"""The GPT example on ranks that are lost: LOSE is a list of ``rank:iteration:moment:how``, in any order.

A rank is the process's place at its start, after the name of its machine (`MACHINE`) if there are several. Moments:
between, forward, backward, reduction, update, copy, save, recovery. How: kill, hang, stop, copies (with all that are
in memory), damage (of all copies), machine (its launcher, with the copies there), freeze (stop, with its launcher),
minute (stop, and continue a minute later, if it is there then). A loss happens once over all generations and restarts,
in the iteration or as soon after it as the process is there: LOSE_ONCE is a folder of what has happened.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import torch

from core.dist_checkpointing import host_copies
from core.training import checkpointing, loop, recovery, train_step
from core.training.launch.entry import run_command
from core.training.launch.generations import COPIES_FOLDER
from core.training.launch.nodes import MACHINE
from tests.unit._program import load_program

_step = loop.train_step
_place = os.environ["RANK"]  # on its machine, until it takes part in a generation
_iteration = 0
_losses = [entry.split(":") for entry in os.environ.get("LOSE", "").split(",") if entry]


def _lose(moment: str) -> None:
    place_here = f"{os.environ.get(MACHINE, '')}{_place}"
    for place, iteration, when, how in _losses:
        once = Path(os.environ["LOSE_ONCE"], f"{place}-{iteration}-{when}-{how}")
        if (place, when) != (place_here, moment) or int(iteration) > _iteration or once.exists():
            continue
        once.touch()
        rank = os.getpid()
        if how == "hang":
            time.sleep(1000)
        if how in ("machine", "copies"):
            while Path(os.environ[COPIES_FOLDER]).exists():  # another rank may write there
                shutil.rmtree(os.environ[COPIES_FOLDER], ignore_errors=True)
        if how == "damage":
            for path in Path(os.environ[COPIES_FOLDER]).glob("generation_*/version_*/rank_*.bin"):
                with path.open("r+b") as file:
                    file.write(b"\x55" * 8)
        if how in ("machine", "freeze"):
            os.kill(os.getppid(), signal.SIGKILL if how == "machine" else signal.SIGSTOP)
        if how == "minute" and os.fork() == 0:
            os.setsid()  # no part of the rank, with which it would end
            time.sleep(60.0)
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGCONT)
            once.with_suffix(".continued").touch()
            os._exit(0)
        os.kill(rank, signal.SIGSTOP if how in ("stop", "freeze", "minute") else signal.SIGKILL)


def _counting_from(copies):
    def construct(state, step, interval):
        global _iteration
        _iteration = step
        return copies(state, step, interval)

    return construct


def _counted(state_step):
    def step(model, *arguments, **settings):
        global _iteration
        _iteration += 1
        time.sleep(float(os.environ.get("STEP_S", "0")))
        _lose("between")
        return state_step(model, *arguments, **settings)

    return step


def _losing(moment: str, function, after: bool = False):
    def run(*arguments, **settings):
        if not after:
            _lose(moment)
        result = function(*arguments, **settings)
        if after:
            _lose(moment)
        return result

    return run


class _LosingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, losses):
        return losses.view_as(losses)

    @staticmethod
    def backward(ctx, gradient):
        _lose("backward")
        return gradient


def _masked_loss(output, batch):
    total, tokens = _loss(output, batch)
    return _LosingBackward.apply(total), tokens


if __name__ == "__main__":
    _loss = train_step._masked_loss
    train_step._masked_loss = _masked_loss
    train_step._forward = _losing("forward", train_step._forward)
    train_step.finalize_model_grads = _losing("reduction", train_step.finalize_model_grads)
    train_step.RunningStep = _losing("update", train_step.RunningStep)
    host_copies.HostCopies._copy = _losing("copy", host_copies.HostCopies._copy)
    checkpointing.CheckpointWriter.save = _losing("save", checkpointing.CheckpointWriter.save)
    loop.train_step = _counted(_step)
    loop.StepCopies = _counting_from(loop.StepCopies)
    program = load_program("pretrain_gpt")
    program.load_newest_copy = _losing("recovery", recovery.load_newest_copy)
    run_command(program.main)
