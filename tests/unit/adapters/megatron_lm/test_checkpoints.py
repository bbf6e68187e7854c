"""Megatron-LM's checkpoints under the wrappers of its adapter: resumed to the bit, and read by any other wrapper."""

from __future__ import annotations

from multiprocessing import current_process
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from core.base.errors import CheckpointError, ParallelConfigError
from core.models.gpt import GPTModel
from core.models.gpt.megatron_layout import load_megatron
from core.transformer.transformer_config import TransformerConfig
from tests.unit._quick import needs
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.adapters import _megatron

pytestmark = needs("megatron")

GATED = {"gated_linear_unit": True, "add_bias_linear": False, "bias_activation_fusion": False}
"""A model whose gate and up are stored as two tensors."""


def _wrapped(kind: str, **fields: Any) -> tuple[Any, Any]:
    """Returns a wrapped model and its optimizer. `kind`: ``stock`` is Megatron-LM's own replicas."""
    from megatron.core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallelConfig

    from core.adapters import megatron_lm

    settings: Any = DistributedDataParallelConfig(use_distributed_optimizer=kind == "zero1")
    if kind in ("optim_grads", "optim_grads_params"):
        settings = DistributedDataParallelConfig(use_megatron_fsdp=True, data_parallel_sharding_strategy=kind)
    elif kind == "fsdp2":
        settings = TorchFullyShardedDataParallelConfig()
    wrapper = {"stock": _megatron.stock("DistributedDataParallel"), "fsdp2": megatron_lm.TorchFullyShardedDataParallel}
    model = _megatron.wrap(wrapper.get(kind, megatron_lm.DistributedDataParallel), _megatron.build(**fields), settings)
    precision = {name: fields[name] for name in ("bf16", "fp16") if name in fields}
    precision |= {"initial_loss_scale": 256.0} if "fp16" in fields else {}
    return model, _megatron.build_optimizer(model, use_distributed_optimizer=kind == "zero1", **precision)


def _request(model: Any, optimizer: Any, metadata: dict[str, Any], *, is_loading: bool) -> dict[str, Any]:
    """Returns what Megatron-LM's `generate_state_dict` does."""
    inner = model.module.module if hasattr(model.module, "module") else model.module
    state = {"model": inner.sharded_state_dict(metadata=metadata)}
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
    return state


def _metadata(**given: Any) -> dict[str, Any]:
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {"singleton_local_shards": False, "chained_optim_avoid_prefix": True, "dp_cp_group": group, **given}


def _save(model: Any, optimizer: Any, folder: Path, **metadata: Any) -> None:
    from megatron.core import dist_checkpointing

    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    with mock.patch.dict(current_process()._config, daemon=False):  # it starts a process
        dist_checkpointing.save(_request(model, optimizer, _metadata(**metadata), is_loading=False), str(folder))


def _load(model: Any, optimizer: Any, folder: Path, **metadata: Any) -> None:
    from megatron.core import dist_checkpointing

    request = _request(model, optimizer, _metadata(**metadata), is_loading=True)
    state = dist_checkpointing.load(request, str(folder))
    model.load_state_dict(state["model"], strict=True)
    optimizer.load_state_dict(state["optimizer"])


@pytest.mark.parametrize(
    ("kind", "fields", "metadata"),
    [
        ("optim_grads_params", {"bf16": True} | GATED, {}),
        ("optim_grads", {}, {}),
        ("fsdp2", {"bf16": True}, {}),
        ("fsdp2", GATED, {}),
        ("zero1", {}, {"distrib_optim_sharding_type": "dp_reshardable"}),
        ("zero1", {"bf16": True}, {"distrib_optim_sharding_type": "fully_reshardable"}),
    ],
)
@on_ranks(2)
def test_a_resume_has_the_bits_of_a_run_without_it(
    tmp_path: Path, kind: str, fields: dict[str, Any], metadata: dict[str, Any]
) -> None:
    with _megatron.groups():
        model, optimizer = _wrapped(kind, **fields)
        _megatron.train(model, 2, continued=optimizer)
        _save(model, optimizer, tmp_path / "saved", **metadata)
        expected = _megatron.train(model, 3, first=2, continued=optimizer)[:2], _megatron.weights(model)
        model, optimizer = _wrapped(kind, **fields)
        _load(model, optimizer, tmp_path / "saved", **metadata)
        resumed = _megatron.train(model, 3, first=2, continued=optimizer)[:2], _megatron.weights(model)
    assert resumed[0] == expected[0]
    assert all(torch.equal(weight, expected[1][name]) for name, weight in resumed[1].items())


def _states(optimizer: Any) -> dict[int, dict[str, Any]]:
    """Returns moments, steps and masters of Megatron-LM's optimizer of replicas, by position."""
    state = optimizer.state_dict()
    found = {i: dict(of) for i, of in state.get("optimizer", state)["state"].items()}
    masters = [master for group in state.get("fp32_from_fp16_params", ()) for master in group]
    return found | {-1: {str(i): master.detach() for i, master in enumerate(masters)}}


@pytest.mark.parametrize("fields", [GATED, {"fp16": True}], ids=["gated", "fp16"])
@on_ranks(2)
def test_every_wrapper_reads_and_writes_megatrons_layout(tmp_path: Path, fields: dict[str, Any]) -> None:
    """A run under Megatron-LM's own replicas goes through each wrapper, and comes back with its bits."""
    with _megatron.groups():
        model, optimizer = _wrapped("stock", **fields)
        _megatron.train(model, 2, continued=optimizer)
        optimizer.param_groups[0]["lr"] = 0.5
        if fields.get("fp16"):
            optimizer.chained_optimizers[0].grad_scaler._scale.fill_(128.0)
        expected, scale, weights = _states(optimizer), optimizer.get_loss_scale(), _megatron.weights(model)
        _save(model, optimizer, tmp_path / "0")
        for index, kind in enumerate(["optim_grads_params", "fsdp2", "optim_grads", "stock"]):
            model, optimizer = _wrapped(kind, **fields)
            _load(model, optimizer, tmp_path / str(index))
            _save(model, optimizer, tmp_path / str(index + 1))
    found = _states(optimizer)
    for index, of_parameter in expected.items():
        assert all(torch.equal(value, found[index][kind]) for kind, value in of_parameter.items()), index
    assert all(torch.equal(weight, weights[name]) for name, weight in _megatron.weights(model).items())
    assert (optimizer.param_groups[0]["lr"], optimizer.get_loss_scale()) == (0.5, scale)


def _trained_and_saved(kind: str, folder: Path) -> dict[str, torch.Tensor]:
    with _megatron.groups():
        model, optimizer = _wrapped(kind, **GATED)
        _megatron.train(model, 2, continued=optimizer)
        _save(model, optimizer, folder)
        return _megatron.weights(model)


def _loaded_and_saved(kind: str, folder: Path, next_folder: Path) -> dict[str, torch.Tensor]:
    with _megatron.groups():
        model, optimizer = _wrapped(kind, **GATED)
        _load(model, optimizer, folder)
        _save(model, optimizer, next_folder)
        return _megatron.weights(model)


@pytest.mark.parametrize("kind", ["optim_grads_params", "fsdp2"])
def test_another_number_of_ranks_continues(tmp_path: Path, kind: str) -> None:
    expected = run_distributed(_trained_and_saved, 2, kind, tmp_path / "2")[0]  # rows that 3 ranks share unevenly
    on_three = run_distributed(_loaded_and_saved, 3, kind, tmp_path / "2", tmp_path / "3")[0]
    on_one = run_distributed(_loaded_and_saved, 1, "stock", tmp_path / "3", tmp_path / "1")[0]
    for found in (on_three, on_one):
        assert all(torch.equal(weight, expected[name]) for name, weight in found.items())


@pytest.mark.parametrize(("kind", "fields"), [("stock", {}), ("optim_grads_params", GATED), ("fsdp2", {"bf16": True})])
@on_ranks(2)
def test_weights_load_into_a_model_of_this_library(tmp_path: Path, kind: str, fields: dict[str, Any]) -> None:
    with _megatron.groups():
        model, optimizer = _wrapped(kind, **fields)
        _megatron.train(model, 2, continued=optimizer)
        _save(model, optimizer, tmp_path / "saved")
        text = _megatron.tokens(0, 0, 0)
        with torch.no_grad():
            expected = model.eval()(text, torch.arange(text.shape[1]).expand_as(text), None).float()
    gated = {name: fields[name] for name in ("gated_linear_unit", "add_bias_linear") if name in fields}
    own = GPTModel(
        TransformerConfig(
            num_layers=2, hidden_size=16, num_attention_heads=2, hidden_dropout=0.0, attention_dropout=0.0, **gated
        ),
        vocab_size=_megatron.VOCAB,
        max_sequence_length=_megatron.SEQUENCE,
        share_embeddings_and_output_weights=False,
        position_embedding_type="learned_absolute",
        parallel_output=False,
    )
    load_megatron(own, tmp_path / "saved")
    with torch.no_grad():
        found = own.eval()(text)
    tolerance = 2e-2 if "bf16" in fields else 1e-5  # bf16 has 8 bits; this model computes in fp32
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@on_ranks(1)
def test_a_checkpoint_that_cannot_be_read_or_written_is_one_line() -> None:
    raises_one_line = _megatron.raises_one_line
    with _megatron.groups():
        model, optimizer = _wrapped("optim_grads")
        of_buckets = _metadata(distrib_optim_sharding_type="dp_reshardable")
        match = "--dist-ckpt-optim-fully-reshardable"
        raises_one_line(CheckpointError, match, _request, model, optimizer, of_buckets, is_loading=True)
        state = _request(model, optimizer, _metadata(), is_loading=False)["optimizer"]
        raises_one_line(CheckpointError, "has no exp_avg", optimizer.load_state_dict, state | {"pieces": {}})
        for group in state["param_groups"]:
            group["wd_mult"] = 7.0
        raises_one_line(CheckpointError, "no group of parameters", optimizer.load_state_dict, state)
        arguments = SimpleNamespace(save="folder", ckpt_format="torch", ckpt_step=3)
        variables = ModuleType("megatron.training.global_vars")
        variables._GLOBAL_ARGS = arguments  # type: ignore[attr-defined]
        with mock.patch.dict("sys.modules", {variables.__name__: variables}):
            raises_one_line(ParallelConfigError, "give --ckpt-format torch_dist", _wrapped, "optim_grads_params")
            arguments.ckpt_format = "fsdp_dtensor"
            _wrapped("optim_grads_params")
            assert (arguments.ckpt_format, arguments.use_distributed_optimizer) == ("torch_dist", False)
            (zero1,) = _wrapped("zero1")[1].chained_optimizers
            raises_one_line(
                CheckpointError,
                "--ckpt-step 3",
                zero1.load_parameter_state,
                "iter_0000006/mp_rank_00/distrib_optim.pt",
            )
