"""Compiles the forward of units, and explains what torch cannot compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import config as functorch_config

from ..._torch_compat import compiler_cause, missing_compiler
from ...errors import ParallelConfigError, ShardstackError

COMPILER = "inductor"
"""Torch's name of the compiler of units."""


def compiled(forward: Callable[..., Any], memory_budget: float | None) -> Callable[..., Any]:
    """Returns a forward that is compiled at its first call.

    Args:
        memory_budget: what is saved for backward, between the inputs alone (0) and all that makes backward fast (1).
            The rest is computed again, what costs least first. None: torch's setting of the process.

    Raises (at the first call of what is returned):
        ParallelConfigError: torch has no compiler for this device here; or the budget is below 1, and the forward
            draws random numbers.
    """
    backend = COMPILER if memory_budget is None else _compiler(float(memory_budget))
    compiled_forward = torch.compile(forward, backend=backend)

    @functools.wraps(forward)
    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled_forward(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            _explain(error)
            raise

    return explained


def _explain(error: Exception) -> None:
    cause = compiler_cause(error)
    if isinstance(cause, ShardstackError):
        raise cause from None
    if (missing := missing_compiler(error)) is not None:
        said, remedy = missing
        message = f"compile_units cannot compile here ({said}); {remedy}, or drop compile_units"
        raise ParallelConfigError(message) from None


@functools.cache
def _compiler(memory_budget: float) -> Callable[..., Any]:
    """Returns the compiler with a budget: one object for each, as code is shared only where the compiler is the same.

    The budget is a setting of the process. It is set while a graph is compiled, so that no other code sees it.
    """

    def compile_within_budget(graph: Any, inputs: Any) -> Any:
        options = {"config_patches": _checks_for_random_numbers()} if memory_budget < 1.0 else {}
        with functorch_config.patch(activation_memory_budget=memory_budget):
            return torch._dynamo.lookup_backend(COMPILER)(graph, inputs, **options)

    return compile_within_budget


@functools.cache
def _checks_for_random_numbers() -> dict[str, Any]:
    """Returns settings of the compiler with which it refuses a graph that draws random numbers.

    Torch may recompute random operations with new draws: the gradient would then use another dropout mask than the
    forward (seen on torch 2.13).
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass  # takes a second, which compiling takes anyway

    class RefuseRandomNumbers(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            for node in graph.nodes:
                if _draws(node):
                    raise ParallelConfigError(
                        f"activation_memory_budget is below 1 and a unit draws random numbers ({node.target}), which "
                        "torch would draw again in backward; set dropout to 0 (hidden_dropout, attention_dropout), or "
                        "use activation_checkpointing"
                    )

        def uuid(self) -> str:
            return "shardstack refuses random numbers"

    return {"joint_custom_pre_pass": RefuseRandomNumbers()}


def _draws(node: torch.fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.name == "dropout_p":  # attention draws where it drops
            given = node.args[index] if index < len(node.args) else argument.default_value
            return bool(node.kwargs.get(argument.name, given) != 0.0)
    return True
