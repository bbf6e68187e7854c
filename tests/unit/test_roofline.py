"""The roofline: its counts of bytes compared with those of real steps and of torch's compiler, and its arithmetic."""

from __future__ import annotations

import argparse
import io
import json
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.base._torch_compat import missing_compiler
from tests.unit._benchmark_modules import load
from tests.unit._spawn import on_ranks

RATES = {
    "products": 700.0,
    "attention": 500.0,
    "attention_2": 350.0,
    "attention_3": 600.0,
    "copy": 4.0,
    "launch": 5.0,
    "memory": 141 * 10**9,
}


def _preset(**fields: Any) -> Any:
    return replace(load("_llama").PRESETS["small"], **fields)


def _asked(**values: float) -> argparse.Namespace:
    names = ("products", "attention", "attention_3", "copy", "launch")
    return argparse.Namespace(**{name: values.get(name) for name in names})


@on_ranks(1)
def test_counts_grow_as_their_tensors_do() -> None:
    step_bytes = load("_step_bytes")
    preset = _preset(vocabulary=2**14, sequence=2**12)
    counts, twice = (step_bytes.count(replace(preset, samples=samples)) for samples in (2, 4))
    hidden = 2 * preset.sequence * preset.hidden * step_bytes.HALF  # bytes of the hidden states
    # Two norms in three kernels each, 7, and two sums both ways, 3 and 3 each with autograd's: at least so much.
    assert counts.layer.nbytes > 20 * hidden
    assert twice.layer.nbytes == pytest.approx(2 * counts.layer.nbytes, rel=0.01)
    assert twice.layer.launches == counts.layer.launches
    assert counts.layer.launches > 4 * 3 + 3 + 6  # linear layers, attention and norms


@on_ranks(1)
def test_norm_and_attention_are_the_kernels_of_a_gpu() -> None:
    step_bytes = load("_step_bytes")
    x = torch.empty(8, 2, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(16, dtype=torch.bfloat16, device="meta", requires_grad=True)
    counted = step_bytes._StepBytes()
    with counted:
        step_bytes._Norm.apply(counted, x, weight).backward(torch.empty_like(x))
    assert counted.by_operator() == {"rms_norm": 7 * x.nbytes + 3 * weight.nbytes} and counted.launches == 3
    query, key = (torch.empty(8, 2, n, 4, dtype=torch.bfloat16, device="meta", requires_grad=True) for n in (4, 2))
    counted = step_bytes._StepBytes()
    with counted:
        output = step_bytes._Attention.apply(counted, query, key, key)
        output.backward(torch.empty_like(output))
    assert output.shape == (8, 2, 16) and counted.moved.nbytes == 3 * key.nbytes  # the sum of key's two gradients
    assert counted.read["attention"] > 0 and query.grad.shape == query.shape


@on_ranks(1)
def test_losses_read_logits_twice_and_write_them_once() -> None:
    step_bytes = load("_step_bytes")
    preset = _preset(vocabulary=2**17, hidden=256, heads=4, sequence=2**12, samples=4)
    tokens, logits = preset.samples * preset.sequence, preset.samples * preset.sequence * preset.vocabulary
    tied = 3 * preset.vocabulary * preset.hidden * step_bytes.HALF  # the sum of the two gradients of its weight
    memory = 32 * logits * step_bytes.HALF
    kept, in_parts = (step_bytes.count(preset, memory - less).losses for less in (0, 1))
    assert kept["plain"] == kept["fused"] == in_parts["plain"]
    assert kept["fused"].nbytes == pytest.approx(6 * logits + tied, rel=0.01)
    assert in_parts["fused"] == in_parts["in parts"]
    sums = 8 * 10 * tokens * preset.hidden  # each part of 2^14 columns is added to the input's gradient
    assert in_parts["fused"].nbytes == pytest.approx(6 * logits + tied + sums, rel=0.02)
    product = 2 * logits * preset.hidden
    assert (kept["fused"].flops, in_parts["fused"].flops) == (3 * product, 4 * product)


@on_ranks(1)
def test_an_update_is_one_pass_over_memory() -> None:
    """Parameters and moments are read and written, 24 bytes; the norm and the update read gradients."""
    step_bytes = load("_step_bytes")
    # bf16: gradients are read twice, 4, weights written, 2, and looked at for writes of others, twice 2.
    assert step_bytes.count_update_bytes("ddp") == pytest.approx(34, abs=0.5)
    # Under sharding wrappers gradients are in fp32, 8, and weights are cast when they are gathered.
    for wrapper in ("zero3", "fsdp2"):
        assert step_bytes.count_update_bytes(wrapper) == pytest.approx(32, abs=0.5), wrapper
    for wrapper in ("bare", "fully_shard"):  # torch's, with its clipping
        assert step_bytes.count_update_bytes(wrapper) > 38, wrapper


@on_ranks(1)
def test_gradients_that_are_not_lent_are_copied() -> None:
    step_bytes = load("_step_bytes")
    tied = step_bytes._UPDATED.vocabulary * step_bytes._UPDATED.hidden / step_bytes.parameters(step_bytes._UPDATED)
    lent, copied = (step_bytes.count_gradient_bytes(are_lent=are_lent) for are_lent in (True, False))
    assert copied == pytest.approx((4, 6), abs=0.01)
    assert lent == pytest.approx((4 * tied, 6), abs=0.05)  # of a tied weight and of norms


@on_ranks(1)
def test_parts_are_work_over_rates() -> None:
    roofline, llama = load("roofline"), load("_llama")
    preset, rates = _preset(micro_batches=3), roofline.Rates(**RATES)
    step = roofline.predict(preset, roofline.DEFAULT, replace(rates, launch=1e-9))
    flops = step.products * rates.products + step.attention * rates.attention / roofline.EXECUTED
    assert flops * 1e9 == pytest.approx(llama.model_flops(preset))
    in_parts = roofline.predict(preset, replace(roofline.DEFAULT, loss="in parts"), rates)
    again = 2 * preset.tokens * preset.vocabulary * preset.hidden  # logits of the loss in parts
    assert (in_parts.products - step.products) * rates.products * 1e9 == pytest.approx(again)
    slow = roofline.predict(preset, roofline.DEFAULT, replace(rates, copy=rates.copy / 2))
    moved = ("elementwise", "loss", "gradients", "update")
    assert all(getattr(slow, part) == pytest.approx(2 * getattr(step, part)) for part in moved)
    assert slow.products == step.products and slow.attention == step.attention
    parts = step.products + step.attention + sum(getattr(step, part) for part in moved)
    assert step.milliseconds == pytest.approx(parts)
    assert roofline.tflops(preset, step) == pytest.approx(llama.model_flops(preset) / parts / 1e9)


@on_ranks(1)
def test_a_host_that_is_slower_than_its_device_decides() -> None:
    roofline = load("roofline")
    preset, rates = _preset(), roofline.Rates(**RATES)
    one, two = (roofline.predict(replace(preset, micro_batches=n), roofline.EAGER, rates) for n in (1, 2))
    assert one.milliseconds == one.host and two.host == pytest.approx(2 * one.host)


@on_ranks(1)
def test_every_item_takes_less_time_of_a_large_model() -> None:
    roofline, preset = load("roofline"), load("_llama").PRESETS["1b"]
    rates = roofline.Rates(**RATES)
    default = roofline.predict(preset, roofline.DEFAULT, rates).milliseconds
    assert roofline.predict(preset, roofline.EAGER, rates).milliseconds > default
    saved = {
        name: default - roofline.predict(preset, replace(roofline.DEFAULT, **change), rates).milliseconds
        for name, change in roofline.ITEMS.items()
    }
    assert min(saved.values()) >= 0 and sum(saved.values()) > 0.01 * default, saved
    everything = {key: value for change in roofline.ITEMS.values() for key, value in change.items()}
    all_saved = default - roofline.predict(preset, replace(roofline.DEFAULT, **everything), rates).milliseconds
    assert all_saved == pytest.approx(sum(saved.values()))  # no two items save the same


@on_ranks(1)
def test_a_report_is_compared_with_its_own_rates(tmp_path: Path) -> None:
    roofline, report = load("roofline"), load("_throughput_report")
    preset = _preset(layers=4, hidden=1024, heads=8, groups=2, ffn=4096, vocabulary=2**15, sequence=1024)
    hardware = 794.5
    rates = roofline.Rates(0.88 * hardware, 500.0, 350.0, 605.0, 4.0, 5.0, 141 * 10**9)
    choices = roofline.Choices(update=50.0, kernel="attention_2")
    seconds = 1.25 * roofline.predict(preset, choices, rates).milliseconds / 1e3
    row = {
        "name": "flash attention",
        "wrapper": "ddp",
        "samples": preset.samples,
        "micro_batches": 1,
        "techniques": ["compiled layers", "loss in parts", "flash attention"],
        "seconds": seconds,
        "update": {"bytes_per_parameter": 50.0},
    }
    other = row | {"name": "full recomputation", "techniques": ["plain", "full recomputation"]}
    written = report.Report([], "NVIDIA H200", {"name": "mine", **asdict(preset)}, rows=[row, other])
    written.matmul_tflops["before"], written.copy_gb_per_second["before"] = hardware, 4000.0
    written.save(path := tmp_path / "report.json")
    with redirect_stdout(io.StringIO()) as printed:
        roofline.compare(path, _asked())
    first, second = printed.getvalue().splitlines()[-2:]
    assert first.startswith("flash attention") and first.endswith("1.25")
    assert second.startswith("full recomputation") and second.endswith("full recomputation: not predicted")
    path.write_text(json.dumps({"rows": []}))
    with pytest.raises(
        ValueError, match=r"report\.json is no report of gpt_throughput\.py .*give one of this version"
    ):
        roofline.compare(path, _asked())


def test_rates_that_are_asked_for_replace_the_planners() -> None:
    roofline = load("roofline")
    h100, h200 = (roofline.default_rates(device, _asked()) for device in ("h100", "h200"))
    assert h100.copy < h200.copy and h100.products == h200.products < 794.5
    measured = roofline.default_rates("h200", _asked(copy=4.3, products=740.0))
    assert (measured.copy, measured.products, measured.attention) == (4.3, 740.0, h200.attention)


def _bytes_of_a_compiled_layer() -> tuple[float, float]:
    """Returns the bytes of a layer, forward and backward, as torch's compiler and as the roofline count them."""
    from torch._inductor import metrics

    preset = _preset(layers=1, hidden=512, heads=8, ffn=2048, groups=2)
    training = load("_llama_training").Training(preset, {}, {"compile_units": True}, "bare")
    torch._logging.set_logs(inductor_metrics=True)  # else the compiler does not count
    metrics.reset()
    training.step()
    torch._logging.set_logs()
    counted = sum(4 * words for node, words in metrics.nodes_num_elem if not node.is_extern())
    return counted, load("_step_bytes").compiled_layer(preset).nbytes


@pytest.mark.long
@on_ranks(1)
def test_a_compiled_layer_moves_what_its_compiler_counts() -> None:
    try:
        torch.compile(lambda x: x + 1)(torch.ones(2))
    except torch._dynamo.exc.TorchDynamoException as error:
        pytest.skip(str(missing_compiler(error)))
    with torch._inductor.config.patch(force_disable_caches=True):  # what is cached is not counted
        counted, stated = _bytes_of_a_compiled_layer()
    assert counted == pytest.approx(stated, rel=0.1), (counted, stated)
