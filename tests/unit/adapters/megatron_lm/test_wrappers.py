"""Megatron-LM's schedule, gradients and optimizer on this library's FSDP2 wrapper, and what they check of it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core.base.errors import ConfigError, ParallelConfigError, ShardstackError, WrapError
from tests.unit._program import run_program
from tests.unit._quick import needs
from tests.unit._spawn import on_ranks
from tests.unit.adapters import _megatron

pytestmark = needs("megatron")

UNITS = 5  # two layers, the embedding, the output layer, and the root, which has the last norm


@pytest.mark.parametrize(
    ("tied", "per_token"), [(False, False), pytest.param(True, False, marks=pytest.mark.long), (False, True)]
)
@on_ranks(2)
def test_it_trains_as_one_process_with_one_reduction_a_step(tied: bool, per_token: bool) -> None:
    from core.adapters import megatron_lm

    with _megatron.groups(), _megatron.counted() as calls:
        model = _megatron.build(tied, calculate_per_token_loss=per_token)
        model = _megatron.wrap(megatron_lm.TorchFullyShardedDataParallel, model)
        losses, norms, _ = _megatron.train(model)
        found = _megatron.weights(model)
        expected_losses, expected_norms, expected = _megatron.serial(2, tied, per_token)
    units = UNITS - 2 * tied  # the root has the embedding, which the output layer reads
    assert calls["foreach_reduce"] == units * _megatron.STEPS, "more than one reduction a step"
    # Norms are sums of squares by shard, not by parameter: that rounding scales the clipped gradients, and Adam
    # carries it on. A step changes a weight by `LR`, which is 0.01.
    torch.testing.assert_close(losses, expected_losses[dist.get_rank()], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norms, expected_norms, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-2 * _megatron.LR)


@on_ranks(2)
def test_its_stages_train_by_megatrons_schedule_as_one_process() -> None:
    from core.adapters import megatron_lm

    with _megatron.groups(pipeline=2), _megatron.counted() as calls:
        model = _megatron.wrap(megatron_lm.TorchFullyShardedDataParallel, _megatron.build_stage())
        losses, norms, _ = _megatron.train(model)
        found = _megatron.weights(model)
        expected_losses, expected_norms, expected = _megatron.serial(1)
        names = {name: _megatron.name_in_model(name) for name in found}
    rank = dist.get_rank()
    # The first stage has the embedding and a layer; the second a layer, the output layer, and the root's last norm.
    assert calls["foreach_reduce"] == (2, 3)[rank] * _megatron.STEPS, "more than one reduction a step"
    torch.testing.assert_close(losses, expected_losses[0] if rank else [], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norms, expected_norms, rtol=1e-5, atol=0.0)
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[names[name]], rtol=0.0, atol=1e-2 * _megatron.LR, msg=name)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"use_distributed_optimizer": True},
        {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
        # What Megatron-LM's arguments set in every run. It counts with `use_megatron_fsdp` alone.
        {"data_parallel_sharding_strategy": "optim_grads_params", "bucket_size": 500, "overlap_grad_reduce": True},
    ],
    ids=lambda changed: "-".join(changed) or "replicas",
)
@on_ranks(2)
def test_its_ddp_trains_with_megatrons_optimizer_as_megatrons(changed: dict[str, Any]) -> None:
    from megatron.core.distributed import DistributedDataParallelConfig

    from core.adapters import megatron_lm

    is_sharded, results = changed.get("use_distributed_optimizer", False), []
    for kind in (_stock("DistributedDataParallel"), megatron_lm.DistributedDataParallel):
        with _megatron.groups():
            model = _megatron.wrap(kind, _megatron.build(), DistributedDataParallelConfig(**changed))
            model.config.no_sync_func = model.no_sync if changed.get("overlap_grad_reduce") else None
            losses, norms, _ = _megatron.train(model, use_distributed_optimizer=is_sharded)
            if changed.get("overlap_param_gather"):
                model.disable_forward_pre_hook()  # as before an evaluation
            results.append((losses, norms, _megatron.weights(model)))
    (losses, norms, expected), (own_losses, own_norms, found) = results
    assert (own_losses, own_norms) == (losses, norms) and expected.keys() == found.keys()
    assert all(torch.equal(weight, found[name]) for name, weight in expected.items())


@on_ranks(1)
def test_a_model_in_bf16_is_loaded_as_megatron_loads_it() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig

    from core.adapters import megatron_lm

    with _megatron.groups():
        for settings in (
            DistributedDataParallelConfig(),
            DistributedDataParallelConfig(use_distributed_optimizer=True),
        ):
            model = _megatron.wrap(megatron_lm.DistributedDataParallel, _megatron.build(bf16=True), settings)
            state = {name: torch.full_like(p, 0.5) for name, p in model.module.module.named_parameters()}
            model.load_state_dict(state, strict=False)  # as Megatron-LM's `load_checkpoint` calls it
            assert all((parameter == 0.5).all() for parameter in model.parameters())


@on_ranks(2)
def test_an_fp16_overflow_in_one_shard_skips_every_ranks_step() -> None:
    from core.adapters import megatron_lm

    steps: list[int] = []

    def overflow_once(optimizer: Any) -> None:
        steps.append(len(steps))
        if steps[-1] == 1 and dist.get_rank() == 1:  # in the shard of one rank alone
            next(model.parameters()).grad.to_local().fill_(float("inf"))

    with _megatron.groups():
        model = _megatron.build(fp16=True)
        model = _megatron.wrap(megatron_lm.TorchFullyShardedDataParallel, model)
        scaler = {"initial_loss_scale": 256.0, "min_loss_scale": 1.0, "hysteresis": 1}
        losses, norms, optimizer = _megatron.train(model, each_step=overflow_once, fp16=True, **scaler)
        scale = optimizer.get_loss_scale().item()
        assert {p.dtype for p in model.parameters()} == {torch.float16}
        assert all(p.isfinite().all() for p in _megatron.weights(model).values())
        expected = _megatron.serial(2)[0][dist.get_rank()]
    of_first_step = slice(_megatron.MICRO_BATCHES)
    assert losses[of_first_step] == pytest.approx(expected[of_first_step], rel=2e-3)  # fp16 has 11 bits
    assert [norm is None for norm in norms] + [scale] == [False, True, False, False, 128.0]


def _stock(name: str) -> type:
    from core.adapters.megatron_lm import registration

    return next(stock for stock, own in registration.REPLACED.items() if own.__name__ == name)


@pytest.mark.parametrize("name", ["DistributedDataParallel", "TorchFullyShardedDataParallel"])
def test_the_class_is_replaced_wherever_megatron_has_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from core.adapters import megatron_lm

    training = ModuleType("megatron.training.training")  # imported before, under the name that it gives the class
    training.DP = _stock(name)
    monkeypatch.setitem(sys.modules, training.__name__, training)
    megatron_lm.register()
    import megatron.core.distributed as stock_package

    assert training.DP is getattr(stock_package, name) is getattr(megatron_lm, name)


def test_a_script_that_has_the_class_already_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from core.adapters import megatron_lm

    script = ModuleType("pretrain_mine")
    script.DP = _stock("DistributedDataParallel")
    monkeypatch.setitem(sys.modules, script.__name__, script)
    with pytest.raises(ShardstackError, match=r"pretrain_mine imported .* before core.adapters.megatron_lm"):
        megatron_lm.register()


def _raises_one_line(error: type[Exception], match: str, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(error, match=match) as raised:
        args[0](*args[1:], **kwargs)
    assert "\n" not in str(raised.value)


@on_ranks(1)
def test_a_setting_that_its_ddp_cannot_honour_is_one_line() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig

    from core.adapters import megatron_lm

    kind = megatron_lm.DistributedDataParallel
    with _megatron.groups():
        settings = DistributedDataParallelConfig(check_for_large_grads=True)
        _raises_one_line(
            ConfigError, "check_for_large_grads is True", _megatron.wrap, kind, _megatron.build(), settings
        )
        model = _megatron.wrap(kind, _megatron.build(), DistributedDataParallelConfig())
        _raises_one_line(WrapError, "wrapper already", _megatron.wrap, kind, model, DistributedDataParallelConfig())


@on_ranks(1)
def test_a_model_or_config_that_it_cannot_take_is_one_line() -> None:
    from core.adapters import megatron_lm

    kind = megatron_lm.TorchFullyShardedDataParallel
    with _megatron.groups():
        once = _megatron.wrap(kind, _megatron.build())
        _raises_one_line(WrapError, "wrapper already", _megatron.wrap, kind, once)
        model = _megatron.build()
        model.config.no_sync_func = once.no_sync  # of a model built before with the same config
        _megatron.wrap(kind, model)
        for name, value, match in (
            ("no_sync_func", print, "leave it None"),
            ("virtual_pipeline_model_parallel_size", 2, "use one stage a rank"),
            ("expert_model_parallel_size", 2, "use expert size 1"),
            ("gradient_accumulation_fusion", True, "--no-gradient-accumulation-fusion"),
        ):
            model = _megatron.build()
            setattr(model.config, name, value)
            _raises_one_line(ParallelConfigError, match, _megatron.wrap, kind, model)
        _raises_one_line(
            ConfigError, "nothing says how to initialise", _megatron.wrap, kind, _megatron.build().to("meta")
        )


def test_settings_of_megatron_are_translated_or_refused() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallelConfig

    from core.adapters import megatron_lm
    from core.adapters.megatron_lm.settings import translate_config

    assert translate_config(TorchFullyShardedDataParallelConfig()).reshard_after_forward is True
    assert translate_config(TorchFullyShardedDataParallelConfig(reshard_after_forward=2)).reshard_after_forward == 2
    assert translate_config(DistributedDataParallelConfig(check_for_nan_in_grad=True)).check_for_nan_in_grad
    _raises_one_line(
        ParallelConfigError,
        "use_distributed_optimizer",
        translate_config,
        DistributedDataParallelConfig(use_distributed_optimizer=True),
    )
    added = TorchFullyShardedDataParallelConfig()
    added.forward_prefetch = 2  # which is no field of Megatron-LM's class
    assert translate_config(added).forward_prefetch == 2
    added.forward_prefetc = 3
    _raises_one_line(
        ParallelConfigError, "has forward_prefetc=3, a setting that is not known here", translate_config, added
    )
    try:
        megatron_lm.register(grad_reduce_in_fp32=True, reshard_after_forward=False)
        assert translate_config(TorchFullyShardedDataParallelConfig()).grad_reduce_in_fp32
        given = TorchFullyShardedDataParallelConfig(reshard_after_forward=2)
        _raises_one_line(ParallelConfigError, "give it once", translate_config, given)
    finally:
        megatron_lm.register()
    _raises_one_line(ParallelConfigError, "no setting of FSDP2", megatron_lm.register, grad_reduce_fp32=True)


def _provided(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> SimpleNamespace:
    from core.adapters import megatron_lm

    given = SimpleNamespace(**{"use_torch_fsdp2": False, "ckpt_format": "torch_dist", "optimizer": "adam"} | arguments)
    variables = ModuleType("megatron.training.global_vars")
    variables.get_args = lambda: given
    monkeypatch.setitem(sys.modules, variables.__name__, variables)
    monkeypatch.setitem(sys.modules, "megatron.training", ModuleType("megatron.training"))
    provider = megatron_lm.with_fsdp2(lambda: "model")
    assert [provider(), provider()] == ["model", "model"]  # an evaluation builds it again
    return given


def test_with_fsdp2_selects_the_wrapper_after_the_check_of_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _provided(monkeypatch, fp16=True, untie_embeddings_and_output_weights=False).use_torch_fsdp2


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("use_distributed_optimizer", True),
        ("use_megatron_fsdp", True),
        ("ckpt_format", "torch"),
        ("optimizer", "muon"),
    ],
)
def test_with_fsdp2_refuses_what_cannot_work(monkeypatch: pytest.MonkeyPatch, flag: str, value: Any) -> None:
    name = "--" + flag.replace("_", "-")
    _raises_one_line(ParallelConfigError, re.escape(name), _provided, monkeypatch, **{flag: value})


def test_a_script_runs_unchanged_by_its_path(tmp_path: Path) -> None:
    script = tmp_path / "pretrain_gpt.py"
    script.write_text(
        "import sys\n"
        "from megatron.core.distributed import TorchFullyShardedDataParallel\n"
        "print(TorchFullyShardedDataParallel.__module__, *sys.argv[1:])\n"
    )
    module = tmp_path / "module.py"  # as -m core.adapters.megatron_lm, in a process that has torch already
    module.write_text(
        "import runpy\nrunpy.run_module('core.adapters.megatron_lm', run_name='__main__', alter_sys=True)\n"
    )
    ended = run_program(module, script, "--flag", folder=tmp_path)
    assert ended.out == "shardstack.adapters.megatron_lm.wrappers --flag\n", ended.err


def test_a_script_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from core.adapters.megatron_lm.__main__ import main

    monkeypatch.setattr(sys, "argv", ["core.adapters.megatron_lm", "pretrain_gtp.py"])
    _raises_one_line(ConfigError, r"pretrain_gtp\.py was given, which is no file", main)
