"""Faults of `core.weights`."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

MUTATIONS = (
    Mutation(
        "a rank merges the adapters of its own pipeline stages alone",
        "core.weights.names.outgoing",
        r"pipeline_ranks\(\)\.all_gather\(adapted\)",
        "[adapted]",
        ("tests/unit/weights/test_stream.py",),
    ),
    Mutation(
        "the base of patches advances before they are acknowledged",
        "core.weights.patches.PatchStream._compare",
        r"self\._pending\[key\] = \(changed, current\[changed\]\)",
        "base[key][changed] = current[changed]",
        ("tests/unit/weights/test_patches.py",),
    ),
    Mutation(
        "a patch compares values and not bits",
        "core.weights.patches.PatchStream._compare",
        r"current\.view\(bits\) != base\[key\]\.view\(bits\)",
        "current != base[key]",
        ("tests/unit/weights/test_patches.py",),
    ),
    Mutation(
        "a receiver takes a patch of another base",
        "core.weights.receiver.WeightReceiver._refusal",
        r"header\['base'\] == self\._state",
        "header['base']",
        ("tests/unit/weights/test_transport.py",),
    ),
    Mutation(
        "a receiver does not compare hashes",
        "core.weights.receiver.WeightReceiver.receive",
        r"sent != digest\.hexdigest\(\)",
        "not sent",
        ("tests/unit/weights/test_transport.py",),
    ),
    Mutation(
        "a stream in mid-step is not refused",
        "core.weights.stream.WeightStream.check_between_steps",
        r"phase is Phase\.ACCUMULATING",
        "phase is None",
        ("tests/unit/weights/test_stream.py",),
    ),
)
