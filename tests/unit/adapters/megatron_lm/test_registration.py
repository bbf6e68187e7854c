"""How the adapter comes into Megatron-LM: by an import, by a script's path, and in a model provider."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from core.base.errors import ConfigError, ParallelConfigError, ShardstackError
from tests.unit._program import run_program
from tests.unit._quick import needs
from tests.unit.adapters import _megatron

pytestmark = needs("megatron")


@pytest.mark.parametrize("name", ["DistributedDataParallel", "TorchFullyShardedDataParallel"])
def test_the_class_is_replaced_wherever_megatron_has_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from core.adapters import megatron_lm

    training = ModuleType("megatron.training.training")  # imported before, under the name that it gives the class
    training.DP = _megatron.stock(name)
    monkeypatch.setitem(sys.modules, training.__name__, training)
    megatron_lm.register()
    import megatron.core.distributed as stock_package

    assert training.DP is getattr(stock_package, name) is getattr(megatron_lm, name)


def test_a_script_that_has_the_class_already_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from core.adapters import megatron_lm

    script = ModuleType("pretrain_mine")
    script.DP = _megatron.stock("DistributedDataParallel")
    monkeypatch.setitem(sys.modules, script.__name__, script)
    with pytest.raises(ShardstackError, match=r"pretrain_mine imported .* before core.adapters.megatron_lm"):
        megatron_lm.register()


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
    _megatron.raises_one_line(ParallelConfigError, re.escape(name), _provided, monkeypatch, **{flag: value})


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
    _megatron.raises_one_line(ConfigError, r"pretrain_gtp\.py was given, which is no file", main)
