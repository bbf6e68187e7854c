"""Faults of `core.tensor_parallel`."""

from __future__ import annotations

from tests.mutation.mutation import Mutation
from tests.mutation.suites import STREAMS_OF_LAYERS

_LOSS_IN_PARTS = "tests/unit/tensor_parallel/test_linear_cross_entropy.py"

_STAGES = "tests/unit/transformer/test_dropout_of_stages.py"

MUTATIONS = (
    Mutation(
        "a column-parallel layer's input keeps this rank's gradient",
        "core.tensor_parallel.mappings._ColumnParallelLinear.backward",
        r"all_reduce_by_backend\(grad_input.*\)",
        "None",
        ("tests/unit/tensor_parallel/test_layers.py",),
    ),
    Mutation(
        "the backward of entering a parallel region adds nothing",
        "core.tensor_parallel.mappings._mapping",
        r"conjugate\(grad, ctx\.group\)",
        "grad",
        ("tests/unit/tensor_parallel/test_mappings.py",),
    ),
    Mutation(
        "targets are looked up in the first rank's vocabulary",
        "core.tensor_parallel.cross_entropy._VocabParallelCrossEntropy.forward",
        r"group_rank\(group\)",
        "0",
        ("tests/unit/tensor_parallel/test_cross_entropy.py",),
    ),
    Mutation(
        "compiled code lends memory for a gradient that autograd returns",
        "core.tensor_parallel.weight_gradients._compute_in_lent_memory",
        r"accumulates_into_leaf\(leaf\)",
        "leaf",
        ("tests/unit/tensor_parallel/test_weight_gradients.py::test_other_consumers_of_compiled_code_borrow_none",),
    ),
    Mutation(
        "compiled layers in fp8 compute a weight's gradient by torch's product",
        "core.tensor_parallel.weight_gradients._Linear.backward",
        r"ctx\.arithmetic is TORCH",
        "True",
        ("tests/unit/test_fp8.py::test_compiled_products_have_the_same_bits",),
    ),
    Mutation(
        "the backward of a column-parallel layer in fp8 has torch's products",
        "core.tensor_parallel.mappings._ColumnParallelLinear.backward",
        r"ctx\.arithmetic\.mm",
        "torch.mm",
        ("tests/unit/test_fp8.py::test_two_ranks_round_their_parts",),
    ),
    Mutation(
        "loss: the gradient of logits is not scaled by that of their tokens",
        "core.tensor_parallel.cross_entropy._gradient_of_logits",
        r"softmax\.mul_\(scale\.unsqueeze\(1\)\)",
        "softmax",
        ("tests/unit/tensor_parallel/test_cross_entropy.py",),
    ),
    Mutation(
        "loss in parts: a tensor-parallel rank takes targets for columns of its own",
        "core.tensor_parallel.cross_entropy._LinearCrossEntropy.backward",
        r"local = target - .*",
        "local = target",
        (f"{_LOSS_IN_PARTS}::test_two_ranks_share_the_vocabulary",),
    ),
    Mutation(
        "loss in parts: a rank normalises by its own vocabulary",
        "core.tensor_parallel.cross_entropy._LinearCrossEntropy.forward",
        r"torch\.logsumexp\(everyone\[:, 0\], dim=0\)",
        "mine[0, 0]",
        (f"{_LOSS_IN_PARTS}::test_two_ranks_share_the_vocabulary",),
    ),
    Mutation(
        "loss in parts: the largest logit is left in the exponent",
        "core.tensor_parallel.cross_entropy._log_sum_exp",
        r"wide\.amax\(dim=1, keepdim=True\)",
        "torch.zeros_like(wide[:, :1])",
        (_LOSS_IN_PARTS,),
    ),
    Mutation(
        "loss in parts: the gradient of the input is that of the last part",
        "core.tensor_parallel.cross_entropy._add_product",
        r"total\.addmm_\(left, right\)",
        "torch.mm(left, right, out=total)",
        (_LOSS_IN_PARTS,),
    ),
    # ---- streams
    Mutation(
        "streams: a layer's input is used before it is gathered",
        "core.tensor_parallel.mappings._ColumnParallelLinear.backward",
        r"gathering\.wait\(\)",
        "pass",
        (STREAMS_OF_LAYERS,),
    ),
    Mutation(
        "streams: a layer's gradient is used before it is added up",
        "core.tensor_parallel.mappings._ColumnParallelLinear.backward",
        r"adding\.wait\(\)",
        "pass",
        (STREAMS_OF_LAYERS,),
    ),
    Mutation(
        "all pipeline stages drop the same units",
        "core.tensor_parallel.random.stage_streams",
        r"stage \+ 1",
        "1",
        (_STAGES,),
    ),
    Mutation(
        "all micro-batches of a stage drop the same units",
        "core.tensor_parallel.random.stage_streams",
        r"else moved_on",
        "else outer",
        (_STAGES,),
    ),
    Mutation(
        "a pipeline stage moves the stream that a loop draws from",
        "core.tensor_parallel.random.stage_streams",
        r"outer if .* else moved_on",
        "moved_on",
        (_STAGES,),
    ),
)
