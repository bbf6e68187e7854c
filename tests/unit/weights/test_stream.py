"""Streams under every wrapper against the files that the export writes, and the memory and messages that they take."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core.base.errors import CheckpointError, ConfigError, ShardstackError
from core.comm import record
from core.distributed import finalize_model_grads, wrap_model
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.transformer.lora import merge_lora
from core.weights import PatchStream, WeightStream
from core.weights.stream import flattened
from tests.unit._quick import needs, quick
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit._whole import whole_weights
from tests.unit.distributed._hugging_face import hugging_face_model
from tests.unit.weights._live_bytes import LiveBytes
from tests.unit.weights._models import BUCKET, CONFIGS, exported, fill, gpt, optimizer_of, start, train, wrapped

EXPERT_CASES = [("ddp", 1), ("zero3", 1), ("fsdp2", 2)]
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 3},
    "qwen3_moe": {"num_experts": 3, "moe_intermediate_size": 8, "num_experts_per_tok": 2},
    "llama": {},
}


def _equals_export(kind: str, folder: Path, tp: int, instances: int, fields: dict[str, Any]) -> list[str]:
    """Returns what differs on this rank between two passes of a stream and the export, before and after a step."""
    start(tp, instances, fields.get("expert_model_parallel_size", 1))
    model = wrapped(kind, gpt(tensor_model_parallel_size=tp, **fields), instances=instances)
    optimizer, problems = optimizer_of(model), []
    for step in range(2):
        expected = exported(model, folder / str(step))
        stream = WeightStream(model, bucket_bytes=BUCKET)
        for _ in range(2):
            received = dict(stream)
            metas = stream.metadata()
            if [meta.name for meta in metas] != list(received) or received.keys() != expected.keys():
                problems.append(f"names {sorted(received.keys() ^ expected.keys())}")
            for meta in metas:
                value = received[meta.name]
                if (value.dtype, tuple(value.shape)) != (meta.dtype, meta.shape):
                    problems.append(f"{meta} came as {value.dtype} {value.shape}")
                if not torch.equal(value, expected[meta.name]):
                    problems.append(f"step {step}: {meta.name}")
        train(model, optimizer, step)
    return problems


@pytest.mark.parametrize("kind", CONFIGS)
def test_stream_equals_export(kind: str, tmp_path: Path):
    assert run_distributed(_equals_export, 2, kind, tmp_path, 1, 1, {"tied": kind != "zero3"}) == [[], []]


@pytest.mark.parametrize("kind", ["zero3", "fsdp2"])
def test_stream_of_hybrid_equals_export(kind: str, tmp_path: Path):
    assert run_distributed(_equals_export, 4, kind, tmp_path, 1, 2, {}) == [[]] * 4


@pytest.mark.parametrize("kind", ["ddp", "zero3", "fsdp2"])
def test_stream_over_tensor_parallelism_equals_export(kind: str, tmp_path: Path):
    size = 4 if kind == "fsdp2" else 2
    fields = {"frozen": True, "tied": False}
    assert run_distributed(_equals_export, size, kind, tmp_path, 2, 1, fields) == [[]] * size


EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "expert_model_parallel_size": 2, "tied": False}


@pytest.mark.parametrize(
    ("kind", "tp"), quick([(kind, tp) for kind in CONFIGS for tp in (1, 2)], lambda case: case in EXPERT_CASES)
)
def test_stream_over_expert_parallelism_equals_export(kind: str, tp: int, tmp_path: Path):
    assert run_distributed(_equals_export, 2 * tp, kind, tmp_path, tp, 1, EXPERTS) == [[]] * (2 * tp)


def _of_stages(kind: str, folder: Path, vpp: int | None, fields: dict[str, Any]) -> list[str]:
    """Returns what differs on this rank between streams and patches of a pipeline's stages, and one model's."""
    start()
    serial = gpt(num_layers=4, lora=True)
    only = dict(WeightStream(serial, adapters="only", process_group=_alone()))
    merge_lora(serial)
    merged = dict(WeightStream(serial, process_group=_alone()))
    stages = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": vpp}
    start(1, 1, fields.get("expert_model_parallel_size", 1), 2, vpp)

    def chunks(**more: Any) -> list[nn.Module]:
        turns = [None] if vpp is None else range(vpp)
        return [wrapped(kind, gpt(num_layers=4, vp_stage=turn, **stages, **more)) for turn in turns]

    model, adapted = chunks(**fields), chunks(lora=True)
    stream = WeightStream(model, bucket_bytes=BUCKET)
    received = {name: value.clone() for name, value in stream}  # views of what patches change
    pairs = [("files", exported(model, folder), received), ("merged", merged, dict(WeightStream(adapted)))]
    pairs.append(("adapters", only, dict(WeightStream(adapted, adapters="only"))))
    if kind == "ddp":
        patches, copy = PatchStream(stream), {name: value.clone() for name, value in received.items()}
        patches.restart()
        for chunk in model:
            fill(next(chunk.parameters()), 9)
        for patch in itertools.chain.from_iterable(patches.changes()):
            patch.apply(copy[patch.name])
        now = dict(stream)
        pairs += [("patches", now, copy if dist.get_rank() == 0 else now)]
    return [
        f"{what}: {name}"
        for what, expected, received in pairs
        for name in expected.keys() | received.keys()
        if name not in received or name not in expected or not torch.equal(received[name], expected[name])
    ]


@pytest.mark.parametrize(("kind", "vpp", "experts"), [("ddp", 2, False), ("zero3", None, True)])
def test_stages_of_a_pipeline_go_out_as_one_model(kind: str, vpp: int | None, experts: bool, tmp_path: Path):
    size, fields = (4, EXPERTS) if experts else (2, {})
    assert run_distributed(_of_stages, size, kind, tmp_path / "model", vpp, fields) == [[]] * size


@pytest.mark.parametrize(("case", "kind"), [("mixtral", "zero3"), ("qwen3_moe", "fsdp2"), ("llama", "zero3")])
@needs("transformers")
@on_ranks(2)
def test_stacked_experts_go_out_as_in_files(case: str, kind: str, tmp_path: Path):
    from safetensors.torch import load_file

    model = hugging_face_model(case, **TRANSFORMERS[case])
    if dist.get_rank() == 0:
        model.save_pretrained(tmp_path)
    dist.barrier()
    expected = load_file(tmp_path / "model.safetensors")
    received = dict(
        WeightStream(wrap_model(model, SimpleNamespace(), CONFIGS[kind](), process_group=dist.group.WORLD))
    )
    assert received.keys() == expected.keys()
    assert [name for name, value in received.items() if not torch.equal(value, expected[name])] == []


def test_stacked_experts_of_an_unknown_model_are_refused():
    pytest.importorskip("transformers")
    model = hugging_face_model("mixtral", num_local_experts=3)
    model.config.model_type = "novel"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="'novel' keeps its experts as 3-D tensors"):
        WeightStream(model)


def _alone() -> dist.ProcessGroup:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


@pytest.mark.parametrize("kind", CONFIGS)
@on_ranks(2)
def test_adapters_are_merged_as_in_one_process(kind: str):
    start()
    serial = gpt(lora=True)
    merge_lora(serial)
    expected = dict(WeightStream(serial, process_group=_alone()))
    received = dict(WeightStream(wrapped(kind, gpt(lora=True)), bucket_bytes=BUCKET))
    assert received.keys() == expected.keys()
    assert [name for name, value in received.items() if not torch.equal(value, expected[name])] == []


@on_ranks(2)
def test_adapters_alone_have_pefts_names():
    start()
    model = wrapped("zero3", gpt(lora=True))
    stream = WeightStream(model, adapters="only", dtype=torch.bfloat16)
    received = dict(stream)
    assert all(value.dtype is torch.bfloat16 for value in received.values())
    low_out = dict(WeightStream(model, "module", adapters="only"))[
        "decoder.layers.0.mlp.linear_fc1.adapter.linear_out.weight"
    ]
    up = received["base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"]
    assert torch.equal(up, low_out[1::2].to(torch.bfloat16))
    assert set(stream.views) == {name for name in stream.views if ".adapter." in name}
    names = set(received)
    layers = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    modules = (*layers, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert names == {
        f"base_model.model.model.layers.{number}.{module}.lora_{half}.weight"
        for number in range(2)
        for module in modules
        for half in "AB"
    }


def _only_the_receiver_holds(kind: str) -> tuple[int, int]:
    """Returns the most bytes that this rank held at once of gathered tensors and messages, and its calls before."""
    start()
    model = wrapped(kind, gpt())
    none = AssertionError("a collective")
    with (
        mock.patch.object(record.CollectiveRecord, "collective", side_effect=none),
        mock.patch.object(dist, "all_gather_object", side_effect=none),
        mock.patch.object(dist, "broadcast_object_list", side_effect=none),
    ):
        stream = WeightStream(model, receivers=[1], bucket_bytes=BUCKET)
        stream.metadata()
        stream.bucket_metadata()
    whole = {name: value.shape for name, value in WeightStream(model)}
    for name, value in stream:
        assert value.shape == whole[name]
        assert value.is_meta == (dist.get_rank() != 1)
    return len(whole), len(stream.bucket_metadata())


@pytest.mark.parametrize("kind", ["ddp", "zero3", "fsdp2"])
def test_other_ranks_get_meta_tensors_and_metadata_sends_nothing(kind: str):
    (tensors, buckets), _ = run_distributed(_only_the_receiver_holds, 2, kind)
    assert tensors > buckets > 3


def _memory(kind: str, bucket: int) -> tuple[int, int]:
    """Returns the bytes of the largest live set of new storages during a pass, and the bound."""
    start()
    model = wrapped(kind, gpt(num_layers=4))
    stream = WeightStream(model, bucket_bytes=bucket, receivers=[0])
    assert stream.owners  # which takes memory that no pass needs
    largest = max(view.numel() * view.element_size() for view in stream.views.values())
    with LiveBytes() as live:
        for _, _tensor in stream:
            pass
    return live.peak, 2 * bucket + largest


@pytest.mark.parametrize(("kind", "bucket"), [("ddp", 3000), ("zero2", 10000), ("zero3", 3000), ("fsdp2", 10000)])
def test_live_bytes_stay_below_the_bound(kind: str, bucket: int):
    (on_receiver, bound), (on_other, _) = run_distributed(_memory, 2, kind, bucket)
    assert 0 < on_receiver <= bound and on_other <= bound


@on_ranks(2)
def test_bad_input_is_one_line():
    start()
    model = wrapped("zero3", gpt())
    messages = []
    for arguments in ({"names": "torch"}, {"only": ["nothing"]}, {"receivers": [2]}, {"adapters": "only"}):
        with pytest.raises(ConfigError) as caught:
            WeightStream(model, **arguments)
        messages.append(str(caught.value))
    tokens = torch.zeros(1, 4, dtype=torch.long)
    model(tokens, labels=tokens).mean().backward()
    with pytest.raises(ShardstackError) as middle:
        next(iter(WeightStream(model)))
    messages.append(str(middle.value))
    assert all("\n" not in message for message in messages)
    parts = ("names is 'torch'", "only names nothing", "the group has 2 ranks", "without adapters", "in mid-step")
    assert [part for part, message in zip(parts, messages, strict=True) if part not in message] == []


def test_flattened_buckets_have_element_offsets():
    bucket = [("a", torch.arange(6.0).view(2, 3)), ("b", torch.ones(2, dtype=torch.int32)), ("c", torch.zeros(4))]
    (flat, places), (integers, _) = flattened(bucket)
    assert [(place.name, place.start_idx, place.end_idx) for place in places] == [("a", 0, 6), ("c", 6, 10)]
    assert torch.equal(flat[:6].view(2, 3), bucket[0][1]) and integers.dtype is torch.int32


@on_ranks(2)
def test_flat_ranges_are_received_in_place():
    start()
    tensors = WeightStream(wrapped("zero3", gpt()), "module")
    assert [
        name
        for name, boxes in tensors.owners.items()
        for offsets, sizes in boxes
        if not torch.empty(tensors.views[name].shape)[
            tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
        ].is_contiguous()
    ] == []


class _Averages(nn.Module):
    """Assigns its buffer in each forward, as a module that averages its outputs may."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return x.square().mean()


@pytest.mark.parametrize("kind", CONFIGS)
@on_ranks(2)
def test_a_kept_stream_sends_the_tensors_of_the_moment(kind: str):
    module, problems = _Averages(), []
    model = wrap_model(module, None, CONFIGS[kind](), process_group=dist.group.WORLD, sub_modules_to_wrap=(nn.Linear,))
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1), [model])
    stream = WeightStream(model, "module")
    patches = PatchStream(stream)
    patches.restart()
    patched = {name: tensor.clone() for name, tensor in stream}
    for step in range(3):
        model.zero_grad_buffer()
        model(torch.ones(2, 6) * (step + 1)).backward()
        finalize_model_grads([model])
        optimizer.step()
        expected = whole_weights(model)
        sent = {name: tensor.clone() for name, tensor in stream}
        for bucket in patches.changes():
            for patch in bucket:
                patch.apply(patched[patch.name])
        patches.acknowledge()
        assert expected["mean"].any()
        for name, tensor in expected.items():
            problems += [] if torch.equal(sent[name], tensor) else [f"{step}: {name} of the stream"]
            if dist.get_rank() == 0 and not torch.equal(patched[name], tensor):
                problems.append(f"{step}: {name} of the patches")
    with model.whole_parameters():
        with torch.no_grad():
            module.linear.weight.mul_(2)
        found = dict(WeightStream(model, "module"))["linear.weight"]
        if kind != "fsdp2" and not torch.equal(found, 2 * sent["linear.weight"]):
            problems.append("what was written inside whole_parameters()")
        if kind == "zero3":
            with pytest.raises(CheckpointError, match="is elsewhere, than when the stream of weights was built"):
                dict(stream)
    module.mean = torch.zeros(7)
    with pytest.raises(CheckpointError, match=r"mean has another shape.*build it anew"):
        dict(stream)
    module.mean = torch.zeros(6)
    module.register_buffer("more", torch.zeros(1))
    with pytest.raises(CheckpointError, match=r"more has another shape.*build it anew"):
        dict(stream)
    assert problems == []


def test_codes_are_not_merged_with_adapters():
    model = gpt(lora=True)
    model.decoder.layers[0].mlp.linear_fc1.weight.quant_state = SimpleNamespace()
    with pytest.raises(ConfigError, match=r"linear_fc1.weight holds packed codes.*adapters='only'"):
        WeightStream(model)
