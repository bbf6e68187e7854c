"""Every public name shared with Megatron-LM takes what the table in the docs says."""

from __future__ import annotations

import importlib
import re

import pytest

from core.distributed import TorchFullyShardedDataParallelConfig
from core.models.common.embeddings import RotaryEmbedding
from core.models.gpt import GPTModel
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.transformer import TransformerConfig
from tests.unit._signatures import PAGE, difference, ours, parse, rows

ROWS = list(rows())
WITH_ABSENT_NAMES = (
    *(
        "core",
        "core.models",
        "core.pipeline_parallel",
        "core.parallel_state",
        "core.tensor_parallel",
        "core.distributed",
        "core.optimizer",
        "core.utils",
    ),
    *("core.models.gpt.gpt_layer_specs", "core.pipeline_parallel.schedules", "core.transformer"),
    "core.transformer.moe",
    *("core.dist_checkpointing", "core.num_microbatches_calculator", "core.datasets.indexed_dataset"),
)


def test_the_table_is_read():
    assert len(ROWS) > 80 and len({row.name for row in ROWS}) == len(ROWS)
    assert sum(row.difference == "same" for row in ROWS) > 60


def test_arguments_are_those_of_the_table():
    found = {row.name: difference(parse(row.theirs), ours(row.name)) for row in ROWS}
    assert found == {row.name: row.difference for row in ROWS}


def test_what_differs_has_a_reason_and_only_that():
    assert [row.name for row in ROWS if (row.difference == "same") == bool(row.reason)] == []


def test_differences_are_seen():
    theirs = parse("a, b=1, *, c=None")
    assert difference(theirs, parse("a, b=1, *, c=None")) == "same"
    assert difference(theirs, parse("b=1, a=0, *, c=2, d")) == "`+d`, `a=0`, `c=2`, `order`"
    assert difference(theirs, parse("a, *, b=1")) == "`-c`, `*b`"
    assert difference(theirs, parse("a, b, *, c=None")) == "`b required`"


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("core.inference", "shardstack has no inference: models here train"),
        ("core.inference.contexts.static_context", "shardstack has no inference: models here train"),
        ("core.dist_checkpointing.serialization", "save and load are in shardstack.dist_checkpointing"),
        (
            "core.transformer.moe.token_dispatcher",
            "shardstack.transformer.moe has no token_dispatcher: moe_token_dispatcher_type",
        ),
    ],
)
def test_an_absent_module_says_what_to_use(module, said):
    with pytest.raises(ModuleNotFoundError, match=said):
        importlib.import_module(module)
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'core.no_such_module'"):
        importlib.import_module("core.no_such_module")


def test_the_settings_of_fsdp2_have_megatrons_path():
    module = importlib.import_module("core.distributed.torch_fully_sharded_data_parallel_config")
    assert module.TorchFullyShardedDataParallelConfig is TorchFullyShardedDataParallelConfig


def test_an_absent_method_says_what_to_use():
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    model = GPTModel(config, vocab_size=8, max_sequence_length=4)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1), [model])
    with pytest.raises(AttributeError, match=r"MegatronOptimizer has no sharded_state_dict: state_tensors\(\)"):
        optimizer.sharded_state_dict({})


def test_an_absent_name_says_what_the_page_says():
    page = PAGE.read_text()  # it says core, as Megatron-LM's users do
    rows = re.findall(r"^\| `(core\.\S+)` \| (.*) \|$", page, re.MULTILINE)
    shown = {name: re.sub(r"\bcore(?=\.[a-z])", "shardstack", remedy) for name, remedy in rows}
    found = {
        f"{module}.{name}": remedy
        for module in WITH_ABSENT_NAMES
        for name, remedy in importlib.import_module(module).__getattr__.remedies.items()
    }
    assert shown == found
    for path, remedy in found.items():
        module, _, name = path.rpartition(".")
        with pytest.raises((ImportError, NotImplementedError), match=re.escape(remedy)):
            getattr(importlib.import_module(module), name)()


def test_calls_of_another_form_name_the_function():
    with pytest.raises(TypeError, match="RotaryEmbedding: missing a required argument: 'kv_channels'"):
        RotaryEmbedding()
    with pytest.raises(TypeError, match="RotaryEmbedding: got an unexpected keyword argument 'scale'"):
        RotaryEmbedding(8, scale=2)
    assert RotaryEmbedding(8, 0.5, False, None, 1e6).base == 1e6  # by position, in Megatron-LM's order
