"""Computes which ranks form a group when a world is divided along several axes.

A rank is a number in mixed radix. Each kind of parallelism is a digit; the first one has stride 1, so that its groups
are neighbouring ranks, which share a machine. A group along some axes is the set of ranks that are equal in every
other digit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from ..base.errors import ParallelConfigError

_TOKENS = ("tp", "pp", "dp", "ep", "cp")  # also the sequence in which an order's missing tokens are appended


def rank_groups(sizes: Mapping[str, int], axes: Collection[str]) -> list[list[int]]:
    """Returns all groups along `axes` in a world of `sizes`, each ascending.

    `sizes` maps axis names to sizes, the axis of stride 1 first. Groups are in the order of the ranks' digits on the
    remaining axes; the first one changes fastest.
    """
    strided: list[tuple[str, int, int]] = []
    stride = 1
    for name, size in sizes.items():
        strided.append((name, size, stride))
        stride *= size
    inside = _offsets((size, step) for name, size, step in strided if name in axes)
    outside = _offsets((size, step) for name, size, step in strided if name not in axes)
    return [[base + offset for offset in inside] for base in outside]


def _offsets(digits: Iterable[tuple[int, int]]) -> list[int]:
    offsets = [0]
    for size, stride in digits:
        offsets = [high * stride + low for high in range(size) for low in offsets]
    return offsets


def parse_order(order: str, sizes: Mapping[str, int]) -> list[str]:
    """Returns the tokens of `order`, followed by missing ones of size 1.

    Raises:
        ParallelConfigError: a token is unknown or repeated, or one of size above 1 is missing.
    """
    tokens = order.lower().split("-")
    for token in tokens:
        if token not in _TOKENS:
            raise ParallelConfigError(
                f"order {order!r} has the unknown token {token!r}; it is a permutation of {'-'.join(_TOKENS)}"
            )
        if tokens.count(token) > 1:
            raise ParallelConfigError(f"order {order!r} names {token!r} twice; name each token once")
    for token in _TOKENS:
        if token in tokens:
            continue
        if sizes[token] != 1:
            raise ParallelConfigError(
                f"order {order!r} leaves out {token!r}, whose size is {sizes[token]}; add it where it belongs"
            )
        tokens.append(token)
    return tokens
