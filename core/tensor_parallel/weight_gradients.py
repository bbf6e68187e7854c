"""Matrix products and look-ups that compute a weight's gradient in a data-parallel wrapper's buffer.

Otherwise a gradient as large as its weight is allocated, filled and then copied. A wrapper with empty memory for it
sets ``weight.lend_gradient_memory``, which a backward, compiled too, calls for memory to compute in. Autograd gets an
ordinary gradient, so that weights used several times, recomputation and hooks need no special cases: autograd adds
gradients as usual, and the wrapper then finds the result in its buffer, or copies it there. If the buffer has the sum
of earlier micro-batches, the new gradient needs other memory, because a product accumulated into the sum rounds
differently. The arithmetic is that of torch's own functions, bit for bit.

Inside `deferring` a backward leaves these products for later: pipeline stages send the gradient of their input first,
and compute weights' gradients while they would wait for a neighbour (Qi et al., 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base._torch_compat import accumulates_into_leaf, called_while_compiled, is_functionalized, replace_returned
from ..base.device import is_on_gpu

Lender = Callable[[], Tensor | None]
"""Returns memory of the weight's shape and dtype, with any contents, to use until the gradient is stored, or None."""

Product = tuple[Tensor, Lender | None, Callable[[Tensor | None], Tensor]]
"""A weight, its lender, and a function that computes the gradient, in memory that it is given or in its own."""


class Arithmetic:
    """How a linear layer's three products are computed: by torch. Subclasses have others, such as those in fp8."""

    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = staticmethod(F.linear)
    """The output, from a contiguous input, the weight and the bias."""

    mm: Callable[..., Tensor] = staticmethod(torch.mm)
    """A product of the output's gradient `[m, k]` and another matrix `[k, n]`, in the memory `out` or in its own."""

    def compiled(self, input_: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Computes the layer in code that torch compiles."""
        output: Tensor = torch.ops.shardstack.linear(input_, weight, bias)
        return output


TORCH = Arithmetic()

_products: list[Product] | None = None
"""Products that the running backward leaves for later, `deferring` sets and restores it."""


@contextmanager
def deferring(products: list[Product]) -> Iterator[None]:
    """Lets backwards inside it append the products of weights' gradients to a list, for `compute_deferred`.

    Run the forward inside it too: otherwise torch's own functions may compute the gradient. Hooks after accumulation
    run in this backward too, without the gradient.
    """
    global _products
    before, _products = _products, products
    try:
        yield
    finally:
        _products = before


def compute_deferred(products: Sequence[Product]) -> None:
    """Accumulates deferred gradients in one backward, in the order of their list. Hooks run as in any other."""
    if products:
        torch.autograd.backward([_Deferred.apply(*product) for product in reversed(products)])


def weight_gradient(ctx: Any, lender: Lender | None, compute: Callable[[Tensor | None], Tensor]) -> Tensor | None:
    """Computes the gradient of the weight, the last argument of `ctx`'s function, or defers it and returns None."""
    if _products is not None and _is_accumulated(ctx.next_functions[-1][0]):
        weight = ctx.next_functions[-1][0].variable
        if not weight._backward_hooks:  # autograd calls hooks without a gradient too
            _products.append((weight, lender, compute))
            return None
    return compute(borrow_gradient_memory(ctx, lender))


def linear(input_: Tensor, weight: Tensor, bias: Tensor | None = None, arithmetic: Arithmetic = TORCH) -> Tensor:
    """Computes torch's linear function: `[..., k]` to `[..., n]` by a weight `[n, k]`."""
    is_traced = torch.compiler.is_compiling()
    if arithmetic is not TORCH:
        tensors = cast_by_autocast(input_, weight, bias)
        return arithmetic.compiled(*tensors) if is_traced else linear_function(*tensors, arithmetic=arithmetic)
    is_ours = _has_lender(weight) or (not is_traced and _products is not None and _is_trained(weight))
    if is_ours and not torch.is_autocast_enabled(input_.device.type) and (not is_traced or _lends_in_compiled_code()):
        return arithmetic.compiled(input_, weight, bias) if is_traced else linear_function(input_, weight, bias)
    return F.linear(input_, weight, bias)


def linear_function(input_: Tensor, weight: Tensor, bias: Tensor | None, arithmetic: Arithmetic = TORCH) -> Tensor:
    """Computes `linear` by the function whose backward is here."""
    # If torch has to copy the input, it adds the bias after the product, which rounds differently.
    joins = input_.dim() == 2 or input_.is_contiguous() or arithmetic is not TORCH
    output: Tensor = _Linear.apply(input_, bias if joins else None, weight, arithmetic)
    return output if joins or bias is None else output.add_(bias)


def cast_by_autocast(input_: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Casts as autocast does for torch's function: backwards run outside it, and autograd has to see the casts."""
    kind = input_.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        return input_.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return input_, weight, bias


def embedding(ids: Tensor, weight: Tensor, adds_rows: bool = False) -> Tensor:
    """Looks up rows as torch does: ids `[...]` to `[..., h]`.

    On CPU a wrapper that lends memory gets a sparse gradient: only the rows in use, each summed in the order of
    torch's dense gradient, which would be mostly zeros. On a GPU the number of rows would need a synchronization.

    Args:
        adds_rows: if ``weight.grad`` is a dense sum already, add the rows to it; it stays dense.
    """
    # Autograd adds rows to a plain tensor's gradient, and its hooks would see them.
    may_add = adds_rows and type(weight) in (Tensor, torch.nn.Parameter) and not weight._backward_hooks
    is_ours = _has_lender(weight) or (may_add and _is_trained(weight))
    if is_ours and weight.is_cpu and not is_on_gpu(weight) and not torch.compiler.is_compiling():
        output: Tensor = _Embedding.apply(ids, weight)
        return output
    return F.embedding(ids, weight)


def lender_of(weight: Tensor) -> Lender | None:
    """Returns the weight's lender for backward to save, because recomputation may pass a weight without attributes."""
    if weight._backward_hooks:  # hooks may keep a gradient
        return None
    lender: Lender | None = getattr(weight, "lend_gradient_memory", None)
    return lender


def borrow_gradient_memory(ctx: Any, lender: Lender | None) -> Tensor | None:
    """Returns lent memory for the gradient of the weight, the last argument of `ctx`'s function, or None.

    Keep no reference to it: autograd copies a gradient that has other references.
    """
    return lender() if lender is not None and _is_accumulated(ctx.next_functions[-1][0]) else None


def _has_lender(weight: Tensor) -> bool:
    return lender_of(weight) is not None and _is_trained(weight)


def _is_trained(weight: Tensor) -> bool:
    return torch.is_grad_enabled() and weight.requires_grad


def _is_accumulated(leaf: Any) -> bool:
    """Returns whether the gradient of a leaf node is accumulated: not under `torch.autograd.grad`, nor for a gradient
    of gradients."""
    return not torch.is_grad_enabled() and accumulates_into_leaf(leaf)


def _holds_dense_sum(ctx: Any) -> bool:
    total = ctx.next_functions[-1][0].variable.grad
    return total is not None and total.layout == torch.strided


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


class _Linear(torch.autograd.Function):
    """torch's linear function, which returns the weight's gradient after the bias's, as torch's own does."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, bias: Tensor | None, weight: Tensor, arithmetic: Arithmetic) -> Tensor:
        ctx.lender, ctx.arithmetic = lender_of(weight), arithmetic
        ctx.is_traced = ctx.lender is None and is_functionalized()
        ctx.save_for_backward(input_, weight)
        return arithmetic.linear(input_.contiguous(), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input_, weight = ctx.saved_tensors
        needs_input, needs_bias, needs_weight, _ = ctx.needs_input_grad
        flat_grad, mm, grad_weight = _flat(grad), ctx.arithmetic.mm, None
        grad_input = mm(flat_grad, weight).view(input_.shape) if needs_input else None
        if not ctx.is_traced and needs_weight:
            grad_weight = weight_gradient(ctx, ctx.lender, lambda out: mm(flat_grad.t(), _flat(input_), out=out))
        elif needs_weight and ctx.arithmetic is TORCH:
            # The compiler's tensors stand for others, whose lenders are known when the code runs.
            grad_weight = torch.ops.shardstack.weight_gradient(flat_grad, _flat(input_), weight)
        elif needs_weight:
            grad_weight = mm(flat_grad.t(), _flat(input_))
        grad_bias = flat_grad.sum(0) if needs_bias else None
        return grad_input, grad_bias, grad_weight, None


class _Deferred(torch.autograd.Function):
    """A number whose backward computes a product, so that autograd accumulates it as any gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, lender: Lender | None, compute: Callable[[Tensor | None], Tensor]) -> Tensor:
        ctx.lender, ctx.compute = lender, compute
        return weight.new_empty(())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.compute(borrow_gradient_memory(ctx, ctx.lender)), None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.shape, ctx.has_lender = weight.shape, lender_of(weight) is not None
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (ids,) = ctx.saved_tensors
        sum_rows = torch.ops.aten.embedding_dense_backward
        is_added = grad.dtype != torch.float16  # torch adds no two sparse gradients of it, as those of two forwards
        if not (is_added and _is_accumulated(ctx.next_functions[-1][0]) and (ctx.has_lender or _holds_dense_sum(ctx))):
            return None, sum_rows(grad, ids, ctx.shape[0], -1, False)
        distinct_ids, place = torch.unique(ids, return_inverse=True)
        rows = sum_rows(grad, place, len(distinct_ids), -1, False)  # [ids, h]
        return None, torch.sparse_coo_tensor(
            distinct_ids.unsqueeze(0), rows, ctx.shape, is_coalesced=True, check_invariants=False
        )


# ---- compiled code

# Compiled code calls `linear` by its name, and the compiler sees its forward and its backward. A weight's gradient is
# an operation, which asks for memory when it runs: one graph serves all layers, and keeps none of their weights. Torch
# keeps compiled code on disk by names of operations, so that one that is compiled in another way needs another name.
torch.library.define("shardstack::linear", "(Tensor input, Tensor weight, Tensor? bias) -> Tensor")
torch.library.impl("shardstack::linear", "CompositeImplicitAutograd", linear_function)


def _compute_in_lent_memory(grad: Tensor, input_: Tensor, weight: Tensor) -> Tensor:
    memory = None
    # Memory with a sum of earlier micro-batches is not lent: asking for it would only take time.
    if weight.requires_grad and not torch.is_grad_enabled() and getattr(weight, "main_grad", None) is None:
        with torch.enable_grad():
            node = weight.view_as(weight).grad_fn
        leaf: Any = node and node.next_functions[0][0]
        # The leaf's parameter: hooks of saved tensors make another tensor of it, without attributes.
        if accumulates_into_leaf(leaf) and (lender := lender_of(leaf.variable)) is not None:
            memory = lender()
    return torch.mm(grad.t(), input_, out=memory)


_SCHEMA = "(Tensor grad, Tensor input, Tensor weight) -> Tensor"
torch.library.define("shardstack::lent_weight_gradient", _SCHEMA)
torch.library.impl("shardstack::lent_weight_gradient", "CompositeImplicitAutograd", _compute_in_lent_memory)
torch.library.define("shardstack::weight_gradient", _SCHEMA)
torch.library.impl("shardstack::weight_gradient", "CompositeExplicitAutograd", lambda grad, x, _: grad.t().mm(x))
torch.library.register_fake("shardstack::weight_gradient", lambda grad, x, weight: weight.new_empty(weight.shape))


@called_while_compiled
def _lends_in_compiled_code() -> bool:
    return replace_returned(torch.ops.shardstack.weight_gradient, torch.ops.shardstack.lent_weight_gradient)
