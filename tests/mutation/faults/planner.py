"""Faults of `core.planner`."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

MUTATIONS = (
    Mutation(
        "memory that is freed counts until the end",
        "core.planner.recorder.Recorder._release",
        r"-block\.nbytes",
        "0",
        ("tests/unit/planner/test_simulation.py",),
    ),
    Mutation(
        "micro-batches that are not simulated cost nothing",
        "core.planner.simulation._repeated",
        r"second \* times",
        "second * 0",
        ("tests/unit/planner/test_simulation.py",),
    ),
    Mutation(
        "planned ranks of one per node have the links of all",
        "core.planner.hardware.Hardware.collective_seconds",
        r"ranks / nodes \* self\.network_bandwidth",
        "self.node_size * self.network_bandwidth",
        ("tests/unit/planner/test_hardware.py",),
    ),
    Mutation(
        "planned computation does not wait for what it reads",
        "core.planner.step_time._Clock._wait_for",
        r"until - self\.now",
        "0.0",
        ("tests/unit/planner/test_step_time.py",),
    ),
    Mutation(
        "planned pipeline stages wait for no other",
        "core.planner.step_time._ends",
        r"max\(now\[rank\], ready\)",
        "now[rank]",
        ("tests/unit/planner/test_step_time.py",),
    ),
    Mutation(
        "offloaded activations are planned as memory of the accelerator",
        "core.planner.recorder.Recorder.as_host_memory",
        r"\[tensor\]",
        "[]",
        ("tests/unit/planner/test_simulation.py",),
    ),
    Mutation(
        "what is computed from offloaded shards is planned as memory of the accelerator",
        "core.planner.phantom.PhantomMode.__torch_dispatch__",
        r"self\._recorder\.sort_into\(ON_HOST, \[tensor\]\)",
        "pass",
        ("tests/unit/planner/test_simulation.py",),
    ),
    Mutation(
        "backward needs as many operations as forward",
        "core.planner.estimates.model_flops",
        r"return 3 \*",
        "return 2 *",
        ("tests/unit/planner/test_simulation.py",),
    ),
    Mutation(
        "a wrapper that nearly fills the memory is recommended",
        "core.planner.tables.recommendation",
        r"_SPARE \* e\.hardware\.memory_bytes",
        "0",
        ("tests/unit/planner/test_command.py::test_the_fastest_that_fits_with_a_margin_is_recommended",),
    ),
)
