from __future__ import annotations

import pytest
from torch import nn

from core.base.errors import ConfigError, ParallelConfigError
from core.transformer.pipeline_stages import StageLayers, pipeline_stage, stages_of
from core.transformer.transformer_config import TransformerConfig

SHORT = {
    "pp": "pipeline_model_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "schedule": "pipeline_parallel_schedule",
    "first": "num_layers_in_first_pipeline_stage",
    "last": "num_layers_in_last_pipeline_stage",
}


def _config(**fields) -> TransformerConfig:
    sizes = {"num_layers": 8, "hidden_size": 8, "num_attention_heads": 2}
    return TransformerConfig(**sizes, **{SHORT[name]: value for name, value in fields.items()})


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, [8]),
        ({"pp": 4}, [2, 2, 2, 2]),
        ({"pp": 2, "vp": 2}, [2, 2, 2, 2]),
        ({"pp": 3, "first": 2}, [2, 3, 3]),
        ({"pp": 3, "last": 2}, [3, 3, 2]),
        ({"pp": 3, "first": 1, "last": 3}, [1, 4, 3]),
        ({"pp": 2, "vp": 2, "first": 2}, [1, 3, 1, 3]),  # a rank's layers are in two places of the pipeline
        ({"pp": 2, "vp": 2, "schedule": "ZBVZeroBubble", "first": 2}, [1, 3, 3, 1]),
    ],
)
def test_layers_divide_among_stages_in_order(fields, layers):
    stages = stages_of(_config(**fields))
    assert [len(stage.layers) for stage in stages] == layers
    assert [number for stage in stages for number in stage.layers] == list(range(8))
    assert [stage.is_first for stage in stages] == [True, *[False] * (len(layers) - 1)]
    assert [stage.is_last for stage in stages] == [*[False] * (len(layers) - 1), True]


_ZBV = "'ZBVZeroBubble' takes 2 for virtual_pipeline_model_parallel_size, which is"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"pp": 3}, "num_layers 8 do not divide among pipeline_model_parallel_size 3; take"),
        ({"pp": 16}, "do not divide among pipeline_model_parallel_size 16"),
        ({"pp": 2, "first": 8}, "of which the first and last have 8 and None"),
        ({"pp": 2, "vp": 3}, "a rank has 4 of num_layers 8, which do not divide among its 3 virtual"),
        ({"vp": 2}, "is 2 with pipeline_model_parallel_size 1; take 2"),
        ({"schedule": "GPipe"}, "is 'GPipe' with pipeline_model_parallel_size 1"),
        ({"pp": 2, "schedule": "1f1b"}, "pipeline_parallel_schedule"),
        ({"pp": 2, "vp": 2, "schedule": "GPipe"}, "'GPipe' takes None for virtual_pipeline_.*, which is 2"),
        ({"pp": 2, "schedule": "ZBVZeroBubble"}, f"{_ZBV} None"),
        ({"pp": 2, "vp": 4, "schedule": "ZBVZeroBubble"}, f"{_ZBV} 4"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_one_line(fields, said):
    with pytest.raises(ConfigError, match=said) as refused:
        _config(**fields)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("vp_stage", [0, 1])
def test_a_model_of_one_stage_has_no_virtual_stage(vp_stage):
    with pytest.raises(ParallelConfigError, match=f"vp_stage is {vp_stage} and virtual_pipeline_model_parallel_size"):
        pipeline_stage(_config(), vp_stage)


def test_layers_are_indexed_from_0_and_named_by_the_whole_model():
    layers = StageLayers([nn.Identity(), nn.Identity()], first=3)
    assert list(dict(layers.named_children())) == ["3", "4"]
    assert layers[0] is next(iter(layers)) and layers[-1] is layers[1] and len(layers) == 2
