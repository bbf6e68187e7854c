"""What is offloaded sleeps between phases: verl's modes, checkpoints and exports wake it, and the numbers stay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from core.distributed import _BaseDataParallel
from tests.unit._quick import needs
from tests.unit._spawn import run_distributed
from tests.unit.adapters.verl import _workers as w

pytestmark = needs("verl")


@contextmanager
def _recorded(calls: list[tuple[str, ...]]) -> Iterator[None]:
    """Notes which parts wrappers release and restore, and fails where a model that sleeps is run."""

    def noting(name: str) -> Any:
        own = getattr(_BaseDataParallel, name, lambda self, *parts: None)

        def call(wrapper: Any, *parts: str) -> None:
            own(wrapper, *parts)
            calls.append((name, *parts))
            before = getattr(wrapper, "asleep", set())
            wrapper.asleep = before | set(parts) if name == "release" else before - set(parts)

        return call

    forward = _BaseDataParallel.forward

    def awake(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        assert "model" not in getattr(wrapper, "asleep", ())
        return forward(wrapper, *args, **kwargs)

    patches = {name: noting(name) for name in ("release", "restore")} | {"forward": awake}
    with mock.patch.multiple(_BaseDataParallel, create=True, **patches):
        yield


def _slept(path: str, folder: str) -> None:
    offloads = {"param_offload": True, "optimizer_offload": True}
    everything, calls = ("gradients", "model", "optimizer"), list[tuple[str, ...]]()
    with w.verl_environment(), _recorded(calls):
        plain = w.worker_of(path, "optim_grads_params")
        worker = w.worker_of(path, "optim_grads_params", **offloads)
        assert calls == [("release", *everything)]

        def left_by(run: Any) -> list[tuple[str, ...]]:
            calls.clear()
            run()
            return list(calls)

        phase = [("restore", *everything), ("release", *everything)]
        assert left_by(lambda: w.train(worker, range(1))) == phase
        assert left_by(lambda: worker.save_checkpoint(folder)) == phase
        assert left_by(lambda: worker.load_checkpoint(folder)) == phase
        assert left_by(lambda: list(worker.engine.get_per_tensor_param()[0])) == phase
        assert left_by(worker.engine.prime_delta_snapshots) == phase
        assert left_by(lambda: worker.infer_batch(w.batch(0))) == [("restore", "model"), ("release", "model")]
        with worker.engine.train_mode():
            assert left_by(lambda: w.train(worker, range(1, 2), disable_auto_offload=True)) == []
        assert left_by(lambda: worker.engine.to("device", optimizer=False)) == [("restore", "gradients", "model")]
        assert left_by(lambda: worker.to("cpu", optimizer=False)) == [("release", "gradients", "model")]

        assert left_by(lambda: w.train(plain, range(2))) == []
        first, second = w.train(worker, range(2, 4)), w.train(plain, range(2, 4))
        worker.engine.to("device")  # the worker's own method calls the device by its name, which here is "cpu" too
        weights = w.weights(worker)
        assert first == second and all(torch.equal(t, weights[name]) for name, t in w.weights(plain).items())

        reference = w.worker_of(path, "optim", forward_only=True, param_offload=True)
        assert left_by(lambda: reference.infer_batch(w.batch(0))) == [("restore", "model"), ("release", "model")]


def test_what_is_offloaded_sleeps_between_phases(tmp_path):
    run_distributed(_slept, 2, w.save_model(tmp_path / "model"), str(tmp_path / "saved"))
