"""Times of collectives written out, and what is taken for a hardware."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from core.base.errors import ConfigError
from core.planner import hardware
from core.planner.hardware import PRESETS, find_hardware
from core.planner.recorder import Ranks, Transfer, Work
from tests.unit._spawn import on_ranks, run_distributed

H100 = PRESETS["h100"]
MIB = 2**20


def test_a_large_gather_takes_its_bytes_and_its_steps():
    inside = H100.collective_seconds(Transfer("all-gather", 800 * MIB, Ranks(range(8))))
    assert inside == pytest.approx(8.4e-6 + 7 * 3.4e-6 + 700 * MIB / H100.link_bandwidth)
    across = H100.collective_seconds(Transfer("all-gather", 1600 * MIB, Ranks(range(16))))
    bandwidth = min(H100.link_bandwidth, 8 * H100.network_bandwidth)
    assert across == pytest.approx(8.4e-6 + 14 * 3.4e-6 + 9.6e-6 + 1500 * MIB / bandwidth)


def test_one_rank_of_each_node_has_one_link():
    nodes = Ranks(range(0, 32, 8))
    sparse = H100.collective_seconds(Transfer("reduce-scatter", 400 * MIB, nodes))
    assert sparse == pytest.approx(300 * MIB / H100.network_bandwidth, rel=0.01)
    assert H100.crossing_bytes(Transfer("reduce-scatter", 400 * MIB, nodes)) == 300 * MIB
    assert H100.crossing_bytes(Transfer("reduce-scatter", 400 * MIB, Ranks(range(4)))) == 0


def test_all_to_all_uses_network_and_links_at_once():
    exchange = Transfer("all-to-all", 1600 * MIB, Ranks(range(16)))
    assert H100.crossing_bytes(exchange) == 800 * MIB
    assert H100.collective_seconds(exchange) == pytest.approx(800 * MIB / H100.network_bandwidth, rel=0.01)
    send = Transfer("send", 100 * MIB, Ranks((7, 8)))
    assert (send.sent_bytes, H100.crossing_bytes(send)) == (100 * MIB, 100 * MIB)


def test_small_shards_take_the_latency_of_every_rank():
    small, large = (
        H100.collective_seconds(Transfer("all-gather", MIB, Ranks(range(ranks)))) for ranks in (1024, 16384)
    )
    assert 10 < large / small < 20  # a ring has a step for each rank


def test_all_reduces_of_few_bytes_take_a_tree():
    many = Ranks(range(16384))
    reduced = H100.collective_seconds(Transfer("all-reduce", 64, many))
    assert reduced < H100.collective_seconds(Transfer("all-gather", 64, many)) / 50


def test_an_operation_takes_the_longer_of_arithmetic_and_memory():
    product = Work("mm", int(1e12), 1000, 2, ())
    assert H100.work_seconds(product) == pytest.approx(1e12 / H100.matmul_flops)
    assert H100.work_seconds(replace(product, itemsize=4)) == pytest.approx(1e12 / H100.fp32_flops)
    attention = replace(product, name="_scaled_dot_product_flash_attention_for_cpu")
    assert H100.work_seconds(attention) == pytest.approx(1e12 / H100.attention_flops)
    assert H100.work_seconds(Work("add", 0, int(1e9), 2, ())) == pytest.approx(1e9 / H100.memory_bandwidth)
    assert H100.work_seconds(Work("add", 0, 8, 2, ())) == H100.launch_s
    on_host = Work("add", 0, int(1e9), 4, (), is_on_host=True)
    assert H100.work_seconds(on_host) == pytest.approx(1e9 / H100.host_memory_bandwidth)


def test_a_file_holds_a_hardware(tmp_path: Path):
    file = tmp_path / "mine.json"
    file.write_text(replace(H100, name="mine").to_json())
    assert find_hardware(str(file)) == replace(H100, name="mine")
    good = asdict(H100)
    values = [0, -1.0, True, "1", None, [1], 10**40, 1e-200, 1e31, math.nan, math.inf]
    changes = [{"launch_s": value} for value in values]
    changes += [{"node_size": 8.0}, {"name": [1]}, {"source": None}, {"more": 1}]
    texts = [json.dumps(good | change) for change in changes]
    texts += ['{"name": "x"}', "[]", "1", "", "{", "[" * 100000, '{"a": ' * 100 + "1" + "}" * 100, "\ud800"]
    for text in texts:
        file.write_text(text, "utf-8", errors="surrogatepass")
        with pytest.raises(ConfigError, match=r"mine\.json' is neither known nor a calibration") as caught:
            find_hardware(str(file))
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


def test_what_is_no_file_is_no_hardware(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("", str(tmp_path), str(tmp_path / "pipe"), "x" * 300, "a\0b", str(tmp_path / "missing")):
        with pytest.raises(ConfigError, match=r"is neither known nor a calibration .*take a100, h100") as caught:
            find_hardware(name)
        assert "\n" not in str(caught.value)


def _links(local_ranks: int) -> dict[str, float]:
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(local_ranks)):
        return hardware._measured_links(torch.zeros(2**20))


def test_ranks_measure_the_links_between_them():
    for node_size, measured in ((2, "link_bandwidth"), (1, "network_bandwidth")):
        for links in run_distributed(_links, 2, node_size):
            assert links.keys() == {"node_size", measured}
            assert links["node_size"] == node_size and links[measured] > 0


@on_ranks(2)
def test_nodes_of_a_calibration_have_equally_many_ranks():
    with pytest.raises(ConfigError, match="2 ranks do not divide into nodes of 3"):
        _links(3)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ConfigError, match="take a100, h100, h200, b200"):
        find_hardware("v100")
