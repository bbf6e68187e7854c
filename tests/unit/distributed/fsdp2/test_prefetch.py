"""Units are gathered ahead in the order in which the model runs, and a wrong guess changes no number."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import nn

from core.base._torch_compat import fsdp_param_groups
from core.distributed import finalize_model_grads
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import CountedTraffic, Stack, build, gradients


def _gathered_ahead(depths: tuple[int, int], order: list[int], recomputes: bool) -> tuple[list[Any], list[Any]]:
    """Returns which layers are gathered, or on their way, when each layer has run: itself until its gradient is
    reduced."""
    module = Stack(4, recomputes)
    layers = list(module.layers)
    model = build(
        "fsdp2",
        module,
        unit_classes=[nn.Linear],
        forward_prefetch=depths[0],
        backward_prefetch=depths[1],
        reshard_overrides=("layers.3=True",),
    )
    seen: list[tuple[int, list[int]]] = []

    def ahead() -> list[int]:
        groups = [fsdp_param_groups(layer._get_fsdp_state())[0] for layer in layers]
        return [i for i, g in enumerate(groups) if g._all_gather_result is not None or g.is_unsharded]

    module.order = order
    x = torch.ones(2, 6, requires_grad=True)
    model(x).sum().backward()  # the first pass learns the order
    for index, layer in enumerate(layers):
        layer.register_forward_hook(lambda m, args, out, i=index: seen.append((i, ahead())))
        layer.register_full_backward_hook(lambda m, *grads, i=index: seen.append((i, ahead())))
    loss = model(x).sum()
    forward, seen[:] = list(seen), []
    loss.backward()
    model.finish_grad_sync()
    assert not ahead()
    return forward, seen


ORDER = [2, 0, 3, 1]


@on_ranks(2)
def test_forward_prefetches_the_asked_number_of_units_in_order() -> None:
    for depth, expected in (
        (1, [(2, [0]), (0, [3]), (3, [1]), (1, [])]),
        (2, [(2, [0, 3]), (0, [1, 3]), (3, [1]), (1, [])]),
        (0, [(2, []), (0, []), (3, []), (1, [])]),
    ):
        assert _gathered_ahead((depth, 1), ORDER, False)[0] == expected


@on_ranks(2)
def test_backward_prefetches_in_reverse_under_recomputation_too() -> None:
    for recomputes, (depth, expected) in product(
        (False, True),
        (
            (0, {1: [], 3: [], 0: [], 2: []}),
            (1, {1: [3], 3: [0], 0: [2], 2: []}),
            (2, {1: [0, 3], 3: [0, 2], 0: [2], 2: []}),
        ),
    ):
        _, events = _gathered_ahead((1, depth), ORDER, recomputes)
        assert {index: sorted({*ahead} - {index}) for index, ahead in events} == expected


@on_ranks(2)
def test_what_backward_never_reaches_is_not_gathered_for_it() -> None:
    module = Stack(4)
    for layer in module.layers[:3]:
        layer.requires_grad_(False)
    model = build("fsdp2", module, unit_classes=[nn.Linear], reshard_overrides=("layers.3=True",), backward_prefetch=2)
    with CountedTraffic() as traffic:
        model(torch.ones(2, 6)).sum().backward()
        model.finish_grad_sync()
    assert traffic.gathers == 1 + 4 + 1  # root and layers, and the last one again


@on_ranks(2)
def test_a_wrong_guess_changes_prefetches_and_no_number() -> None:
    module = Stack(4)
    model = build("fsdp2", module, unit_classes=[nn.Linear], forward_prefetch=2)
    for order in ([0, 1, 2, 3], [3, 1], [1, 1, 2, 0], [0, 1, 2, 3]):
        module.order, expected = order, Stack(4)
        expected.order = order
        with torch.no_grad():  # gathers ahead what it then does not use
            module.order = [0]
            model(torch.ones(2, 6))
            module.order = order
        model(torch.ones(2, 6)).sum().backward()
        finalize_model_grads([model])
        expected(torch.ones(2, 6)).sum().backward()
        for (name, found), wanted in zip(gradients(model).items(), expected.parameters(), strict=True):
            assert torch.equal(found, torch.zeros_like(wanted) if wanted.grad is None else wanted.grad), (order, name)
        model.zero_grad_buffer()


@on_ranks(2)
def test_prefetched_parameters_are_regathered_after_an_update() -> None:
    module = Stack(3)
    model = build("fsdp2", module, unit_classes=[nn.Linear])
    x = torch.ones(2, 6)
    with torch.no_grad():
        model(x)
        module.order = [0]
        model(x)  # gathers layer 1 ahead, and does not use it
        for parameter in model.parameters():
            parameter.to_local().mul_(2.0)
        module.order = [0, 1, 2]
        doubled = Stack(3)
        for parameter in doubled.parameters():
            parameter.mul_(2.0)
        assert torch.equal(model(x), doubled(x))
