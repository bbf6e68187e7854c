"""torchtitan's own trainer on this library's FSDP2 engine: what it trains to, what it sends, and what is refused."""

from __future__ import annotations

import dataclasses
import re
import sys
import tempfile
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from core.base.errors import ParallelConfigError, WrapError
from tests.unit._program import REPOSITORY, programs_in
from tests.unit._quick import needs
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.adapters import _megatron, _titan

pytestmark = needs("torchtitan")

UNITS = 5  # the embedding, two layers, the output layer, and the root, which has the last norm


def _trains_as_one_process(chunked: bool, backend: str, tied: bool) -> tuple[list[float], list[float]]:
    """Returns the losses and norms, which the first rank has compared with one process."""
    with tempfile.TemporaryDirectory() as folder, _titan.cpu_is_the_device(), _megatron.counted() as calls:
        from core.adapters.torchtitan import with_fsdp2

        config = _titan.config_of(folder, chunked=chunked, tied=tied)
        config.parallelism.spmd_backend = backend
        losses, norms, trainer = _titan.train(with_fsdp2(config))
        model = trainer.model_parts[0]
        found = _megatron.weights(model)
        assert calls["foreach_reduce"] == (UNITS - tied) * _titan.STEPS, "more than one reduction a step"
        if dist.get_rank() > 0:
            return losses, norms
        expected_losses, expected_norms, expected = _titan.serial(_titan.config_of(folder, tied=tied), 2)
    # torchtitan's norm adds the squares of an embedding's 2^19 elements in fp32, which is random rounding of the order
    # of 2^9.5 times 2^-24, that is 4e-5; it scales what is clipped, and AdamW carries it on.
    # A loss is a mean over 150 tokens of all ranks, added in another order: 150 roundings by 2^-24 are 1e-5.
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(norms, expected_norms, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.05 * _titan.LR)
    return losses, norms


@pytest.mark.parametrize(
    ("chunked", "backend", "tied"),
    [
        pytest.param(False, "spmd_types", False, marks=pytest.mark.long),
        (True, "spmd_types", False),
        (False, "partial_dtensor", True),
    ],
)
def test_its_trainer_matches_one_process_and_reduces_once(chunked: bool, backend: str, tied: bool) -> None:
    first, second = run_distributed(_trains_as_one_process, 2, chunked, backend, tied)
    assert first == second


def _raises_one_line(error: type[Exception], match: str, function: Any) -> None:
    with pytest.raises(error, match=match) as raised:
        function()
    assert "\n" not in str(raised.value)


@on_ranks(1)
def test_a_setting_or_model_that_it_cannot_take_is_one_line() -> None:
    with tempfile.TemporaryDirectory() as folder, _titan.cpu_is_the_device():
        from torchtitan.trainer import Trainer

        from core.adapters.torchtitan import with_fsdp2

        for section, name, value in (
            ("parallelism", "spmd_backend", "full_dtensor"),
            ("parallelism", "enable_fsdp_symm_mem", True),
        ):
            config = with_fsdp2(_titan.config_of(folder))
            setattr(getattr(config, section), name, value)
            _raises_one_line(ParallelConfigError, name, lambda config=config: Trainer(config))

        for axis in ("tensor", "context", "pipeline", "expert"):
            config = with_fsdp2(_titan.config_of(folder))
            shard = config.model_spec.parallelize_fn
            degree = {f"{axis}_parallel_degree": 2}

            def on_two(model: torch.nn.Module, *, parallelism: Any, **settings: Any) -> torch.nn.Module:
                return shard(model, parallelism=dataclasses.replace(parallelism, **degree), **settings)  # noqa: B023

            config.model_spec.parallelize_fn = on_two
            _raises_one_line(
                ParallelConfigError, f"{axis}_parallel_degree is 2", lambda config=config: Trainer(config)
            )

        def twice(model: torch.nn.Module, **settings: Any) -> torch.nn.Module:
            return shard(shard(model, **settings), **settings)

        config = with_fsdp2(_titan.config_of(folder))
        shard = config.model_spec.parallelize_fn
        config.model_spec.parallelize_fn = twice
        _raises_one_line(WrapError, "cannot be sharded again", lambda: Trainer(config))


@on_ranks(1)
def test_its_command_finds_its_configs_and_the_pages_own() -> None:
    with _titan.cpu_is_the_device():
        from torchtitan.config import ConfigManager

        from core.adapters.torchtitan import parallelize

        flags = ["--module", "core.adapters.torchtitan", "--config", "llama3_debugmodel", "--training.steps", "3"]
        config = ConfigManager().parse_args(flags)
        assert config.model_spec.parallelize_fn is parallelize and config.training.steps == 3
        with pytest.raises(ValueError, match="'llama3_debug' not found"):
            ConfigManager().parse_args([*flags[:3], "llama3_debug"])
        with (
            mock.patch.dict(sys.modules, {"torchtitan.models.llama3.config_registry": None}),
            pytest.raises(ImportError, match="llama3"),
        ):
            ConfigManager().parse_args(flags)
        for program in programs_in(REPOSITORY / "docs" / "torchtitan.md"):
            names: dict[str, Any] = {}
            exec(program, names)
            shown = [value() for name, value in names.items() if re.match("llama3_.*_sharded", name)]
            assert [config.model_spec.parallelize_fn for config in shown] == [parallelize]
