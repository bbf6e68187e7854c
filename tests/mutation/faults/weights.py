"""Faults of `core.weights`."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

MUTATIONS = (
    Mutation(
        "a rank merges the adapters of its own pipeline stages alone",
        "core.weights.names.outgoing",
        r"pipeline_ranks\(\)\.all_gather\(updates\)",
        "[updates]",
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
        "core.weights.receiver.WeightReceiver._check",
        r"header\.base != self\._state",
        "not header.base",
        ("tests/unit/weights/test_receiver.py",),
    ),
    Mutation(
        "a receiver does not compare hashes",
        "core.weights.receiver.WeightReceiver._put",
        r"end != digest",
        "not end",
        ("tests/unit/weights/test_receiver.py",),
    ),
    Mutation(
        "a receiver takes other tensors than a header promises",
        "core.weights.receiver.WeightReceiver._check_bucket",
        r"entries != promised",
        "len(entries) != len(promised)",
        ("tests/unit/weights/test_link.py",),
    ),
    Mutation(
        "a patch writes before its places are checked",
        "core.weights.receiver.WeightReceiver._put",
        r"patch\.check\(self\.weights\[patch\.name\]\)",
        "pass",
        ("tests/unit/weights/test_link.py",),
    ),
    Mutation(
        "a sender of weights listens on every interface",
        "core.weights.link._signed_store",
        r"listen\(place\)",
        "listen(('0.0.0.0', place[1]))",
        ("tests/unit/weights/test_link.py",),
    ),
    Mutation(
        "adapters of PEFT are merged with another scaling",
        "core.weights.peft_layers._merged",
        r"cast\(Any, module\)\.merge\(\)",
        "vars(module).update(scaling=dict.fromkeys(vars(module).get('scaling', ()), 1.0)); module.merge()",
        ("tests/unit/weights/test_peft_layers.py",),
    ),
    Mutation(
        "adapters of PEFT are merged into the model itself",
        "core.weights.peft_layers._with_tensors",
        r"\.clone\(\)",
        "",
        ("tests/unit/weights/test_peft_layers.py",),
    ),
    Mutation(
        "what a trained copy takes the place of goes out with it",
        "core.weights.peft_layers.added_names",
        r" and \(?not name\.startswith\(kept\)\)?",
        " and 'original_module' not in name",
        ("tests/unit/weights/test_peft_layers.py",),
    ),
    Mutation(
        "an adapter on an adapter is merged alone",
        "core.weights.peft_layers.merges_of",
        r" or stem\.startswith\(outer\)",
        "",
        ("tests/unit/weights/test_peft_layers.py",),
    ),
    Mutation(
        "a stream in mid-step is not refused",
        "core.weights.stream.WeightStream.check_between_steps",
        r"wrapper\.step\.reject_mid_step\(.*\)",
        "pass",
        ("tests/unit/weights/test_stream.py",),
    ),
)
