"""Sizes and ranks that a script sets in place of those of its process groups: Megatron-LM's setters.

A script that builds one rank's part of a model without the other ranks (a converter, a test) sets them; the getters
of `core.parallel_state` then return these, and no group has to exist. None takes a value back, as does
`destroy_model_parallel`. Groups and their collectives never change.
"""

from __future__ import annotations

from .errors import ParallelConfigError

sizes: dict[str, int] = {}
"""By kind of group, as `parallel_groups` names them. The setters write it, `parallel_state` reads and clears it."""

ranks: dict[str, int] = {}
"""The same for this rank's place in a group."""

_virtual: dict[str, int] = {}


def _assume(assumed: dict[str, int], kind: str, value: int | None) -> None:
    assumed.pop(kind, None)
    if value is not None:
        assumed[kind] = value


def forget() -> None:
    """Takes back everything that was set."""
    sizes.clear()
    ranks.clear()
    _virtual.clear()


def set_tensor_model_parallel_world_size(world_size: int | None) -> None:
    """What `get_tensor_model_parallel_world_size` returns; None: the group's own."""
    _assume(sizes, "tp", world_size)


def set_tensor_model_parallel_rank(rank: int | None) -> None:
    """What `get_tensor_model_parallel_rank` returns; None: the group's own."""
    _assume(ranks, "tp", rank)


def set_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """What `get_pipeline_model_parallel_world_size` returns; None: the group's own."""
    _assume(sizes, "pp", world_size)


def set_pipeline_model_parallel_rank(rank: int | None) -> None:
    """What `get_pipeline_model_parallel_rank` returns; None: the group's own."""
    _assume(ranks, "pp", rank)


def set_data_parallel_rank(rank: int | None) -> None:
    """What `get_data_parallel_rank` returns, of the group without context parallelism; None: the group's own."""
    _assume(ranks, "dp", rank)


def set_expert_model_parallel_world_size(world_size: int | None) -> None:
    """What `get_expert_model_parallel_world_size` returns; None: the group's own."""
    _assume(sizes, "ep", world_size)


def set_expert_model_parallel_rank(rank: int | None) -> None:
    """What `get_expert_model_parallel_rank` returns; None: the group's own."""
    _assume(ranks, "ep", rank)


def set_expert_tensor_parallel_world_size(world_size: int | None) -> None:
    """What `get_expert_tensor_parallel_world_size` returns; None: the group's own."""
    _assume(sizes, "expert_tp", world_size)


def set_expert_tensor_parallel_rank(rank: int | None) -> None:
    """What `get_expert_tensor_parallel_rank` returns; None: the group's own."""
    _assume(ranks, "expert_tp", rank)


def set_virtual_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Takes None alone: a rank holds one pipeline stage, and stages are not interleaved.

    Raises:
        ParallelConfigError: a number.
    """
    if world_size is not None:
        raise ParallelConfigError(
            f"set_virtual_pipeline_model_parallel_world_size was given {world_size}, but a rank holds one pipeline "
            "stage; give None"
        )


def get_virtual_pipeline_model_parallel_world_size() -> None:
    """None: pipeline stages are not interleaved."""


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """What `get_virtual_pipeline_model_parallel_rank` returns. Nothing else reads it: a rank holds one stage."""
    _assume(_virtual, "pp", rank)


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """What was set; None by default."""
    return _virtual.get("pp")
