"""Speeds of accelerators and their links: presets with their sources, and measurements of the machine.

Rates of products are what torch reaches in the best shapes, and links what NCCL reaches with large messages. Shares of
a datasheet that are not measured are marked as assumed.
"""

from __future__ import annotations

import functools
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..base import device
from ..base.checked_json import checked
from ..base.device import barrier
from ..base.errors import ConfigError
from ..base.files import brief, read_json
from ..comm import collectives, streams
from ..rendezvous import default_group
from ..rendezvous.environment import environment_int
from .recorder import HOST, Ranks, Transfer, Work

_MOST = 1e30
"""Largest rate, and the inverse of the smallest: products and quotients of two stay finite."""

Rate = Annotated[float, lambda rate: 1 / _MOST <= rate <= _MOST, f"within {_MOST:g}"]
Count = Annotated[int, range(1, 2**63)]


@dataclass(frozen=True)
class Hardware:
    """One accelerator, its node and its network. Rates are a second, memory and bandwidths in bytes."""

    name: str
    memory_bytes: Count
    peak_flops: Rate
    """Dense 16-bit operations of the datasheet, the denominator of MFU."""
    matmul_flops: Rate
    """16-bit operations that large products reach."""
    fp32_flops: Rate
    """Speed of fp32 products that are computed in fp32. In TF32 half of `matmul_flops` is taken."""
    attention_flops: Rate
    """16-bit operations of FlashAttention-2, forward and backward."""
    memory_bandwidth: Rate
    """Bandwidth that elementwise operations reach."""
    launch_s: Rate
    """Least seconds of an operation: what the host takes to queue it."""
    node_size: Count
    """Accelerators of a node."""
    link_bandwidth: Rate
    """Bandwidth from one accelerator to others in its node, in one direction, as a ring of NCCL reaches it."""
    network_bandwidth: Rate
    """Bandwidth from one accelerator to other nodes, in one direction."""
    host_bandwidth: Rate
    """Bandwidth of copies between an accelerator and its host's pinned memory, in one direction."""
    host_memory_bandwidth: Rate
    """An accelerator's share of the bandwidth of host memory, which bounds updates of offloaded shards."""
    source: str

    def work_seconds(self, work: Work) -> float:
        """Returns the time of an operation: of its arithmetic or its memory, whichever takes longer."""
        if work.is_on_host:
            return work.nbytes / self.host_memory_bandwidth
        half = work.itemsize <= 2
        rate = self.matmul_flops if half else self.fp32_flops
        if "attention" in work.name and half:
            rate = self.attention_flops
        return max(work.flops / rate, work.nbytes / self.memory_bandwidth, self.launch_s)

    def collective_seconds(self, collective: Transfer) -> float:
        """Returns the time of a collective, with NCCL's model of its rings and trees: the fastest of its protocols."""
        ranks, nodes = len(collective.ranks), _num_nodes(collective.ranks, self.node_size)
        if collective.ranks == HOST:
            return collective.nbytes / self.host_bandwidth
        if ranks == 1:
            return 0.0
        if collective.kind == "all-to-all":  # messages of all pairs, at once
            across = self.crossing_bytes(collective)
            latency = min(base + link + (nodes > 1) * network for base, link, network, _ in _NCCL["ring"])
            inside = (collective.sent_bytes - across) / self.link_bandwidth
            return latency + max(inside, across / self.network_bandwidth)
        bandwidth = self.link_bandwidth
        if nodes > 1:
            bandwidth = min(bandwidth, ranks / nodes * self.network_bandwidth)
        # Steps inside a node, and between nodes.
        steps: dict[str, tuple[float, float]] = {"ring": (ranks - nodes, nodes - 1)}
        passes = 1
        if collective.kind == "all-reduce":
            steps["tree"], passes = (ranks / nodes - 1, math.log2(nodes)), 2
        return min(
            base + passes * (inside * link + between * network) + collective.sent_bytes / (bandwidth * share)
            for algorithm, (inside, between) in steps.items()
            for base, link, network, share in _NCCL[algorithm]
        )

    def crossing_bytes(self, collective: Transfer) -> int:
        """Returns how many of `Transfer.sent_bytes` leave the node, on average over the group's ranks.

        Of the links of a ring, one a node leaves it. Of all-to-all, the messages to ranks of other nodes do.
        """
        nodes, ranks = _num_nodes(collective.ranks, self.node_size), len(collective.ranks)
        if collective.kind == "all-to-all":
            return int(collective.sent_bytes * (ranks - ranks / nodes) / max(ranks - 1, 1))
        return 0 if nodes == 1 else collective.sent_bytes * nodes // ranks

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


@functools.cache
def _num_nodes(ranks: Ranks, node_size: int) -> int:
    """Returns the number of nodes of a group. Consecutive ranks are in one node."""
    return len({rank // node_size for rank in ranks})


_NCCL: dict[str, list[tuple[float, ...]]] = {
    algorithm: [(*(1e-6 * us for us in latencies), share) for *latencies, share in protocols.values()]
    for algorithm, protocols in json.loads(Path(__file__).with_name("nccl.json").read_text("utf-8")).items()
}
"""Seconds of a call, of a step inside a node and between nodes, and the share of the bandwidth, by algorithm and
protocol.

Only all-reduces have a tree. From NCCL's own tuning (github.com/NVIDIA/nccl, src/graph/tuning.cc), in microseconds in
the file."""

PRESETS = {
    values["name"]: Hardware(**values)
    for values in json.loads(Path(device.__file__).with_name("hardware.json").read_text("utf-8"))
}
"""By name, in the form that `calibrate` writes."""


def find_hardware(name: str) -> Hardware:
    """Returns a preset, or what ``--calibrate`` wrote into a file.

    Raises:
        ConfigError: there is neither a preset nor a file of that name, or the file is no calibration.
    """
    if name.lower() in PRESETS:
        return PRESETS[name.lower()]
    try:
        return checked(read_json(Path(name)), Hardware)  # type: ignore[no-any-return]
    except (OSError, ValueError) as error:  # BoundsError, and a name that no file has
        known = f"hardware {brief(name)} is neither known nor a calibration ({error}); take {', '.join(PRESETS)}"
        raise ConfigError(f"{known}, or a file that --calibrate wrote") from None


_REPEATS = 7
_MOST_SPREAD = 0.2


def calibrate(links: Hardware) -> tuple[Hardware, str]:
    """Returns this machine's hardware, and lines that say that links are not measured, or that the machine was busy.

    Every rank of a launcher's calls it, which ends the process group.

    Args:
        links: the hardware whose attention is taken, in proportion to products, and links that are not measured.
    """
    default_group.init_process_group()
    place = device.current_device()
    is_gpu = place.type == "cuda"
    size, elements = (8192, 2**28) if is_gpu else (768, 2**24)
    halves = torch.randn(2, size, size, device=place).bfloat16()
    wholes, small = halves.float(), torch.zeros(1, device=place)
    source = torch.zeros(elements, device=place)
    target = torch.zeros_like(source)
    times = {
        "half": _seconds(lambda: torch.mm(halves[0], halves[1])),
        "fp32": _seconds(lambda: torch.mm(wholes[0], wholes[1])),
        "copy": _seconds(lambda: target.copy_(source)),
        "launch": _seconds(lambda: [small.add_(1) for _ in range(1000)]),
    }
    half, fp32, copy, launch = (statistics.median(seconds) for seconds in times.values())
    values = _measured_links(source)
    if (ranks := dist.get_world_size()) > 1:
        barrier()
    dist.destroy_process_group()
    spread = max(max(seconds) / min(seconds) - 1 for seconds in times.values())
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    busy = spread > _MOST_SPREAD or load > (os.cpu_count() or 1) / 2
    matmul = 2 * size**3 / half
    hardware = replace(
        links,
        name=torch.cuda.get_device_name(place) if is_gpu else "cpu",
        memory_bytes=device.memory_bytes(),
        peak_flops=links.peak_flops if is_gpu else matmul,
        matmul_flops=matmul,
        fp32_flops=2 * size**3 / fp32,
        attention_flops=links.attention_flops / links.matmul_flops * matmul,
        memory_bandwidth=2 * source.nbytes / copy,
        launch_s=launch / 1000,
        source=f"measured, with {', '.join(values) or 'no link'}; all else and attention's share as of {links.name}",
        **values,
    )
    note = "" if ranks > 1 else "links are not measured by one rank; start one for each accelerator with a launcher\n"
    warning = (
        f"warning: the machine was busy: times of one operation differ by {100 * spread:.0f} %, and its load is "
        f"{load:.1f}; calibrate again when it is idle\n"
    )
    return hardware, note + (warning if busy else "")


def _measured_links(source: Tensor) -> dict[str, Any]:
    """Returns the node's size and the bandwidths of all-gathers, inside a node and over one rank of each."""
    ranks = dist.get_world_size()
    if ranks == 1:
        return {}
    size = environment_int("LOCAL_WORLD_SIZE", ranks, least=1)
    if ranks % size:
        raise ConfigError(
            f"{ranks} ranks do not divide into nodes of {size}; start as many on each to calibrate links"
        )
    nodes = [[*range(first, first + size)] for first in range(0, ranks, size)]
    values: dict[str, Any] = {"node_size": size}
    for name, groups in (("link_bandwidth", nodes), ("network_bandwidth", [*zip(*nodes, strict=True)])):
        if (number := len(groups[0])) > 1:
            group, _ = dist.new_subgroups_by_enumeration([*map(list, groups)])
            whole = source[: len(source) // number * number]
            own = whole.chunk(number)[0].clone()
            gather = partial(collectives.all_gather, whole, own, group, what="a calibration")
            values[name] = (whole.nbytes - own.nbytes) / statistics.median(_seconds(gather))
    return values


def _seconds(run: Callable[[], object]) -> list[float]:
    """Returns the seconds of each of some calls, after one that is not counted."""
    synchronize = streams.synchronize if device.device_type() == "cuda" else lambda: None
    seconds = []
    for _ in range(_REPEATS + 1):
        synchronize()
        began = time.perf_counter()
        run()
        synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds[1:]
