"""Faults of `core.transformer`."""

from __future__ import annotations

from tests.mutation.mutation import Mutation
from tests.mutation.suites import STREAMS_OF_LAYERS

_MOE_LAYER = "tests/unit/transformer/moe/test_moe_layer.py"
_DISPATCH = "tests/unit/transformer/moe/test_dispatch.py"
_BALANCING = "tests/unit/transformer/moe/test_load_balancing.py"
_EXPERTS_OF_RANKS = "tests/functional/test_experts.py::test_ranks_of_one_model_equal_one_process"

MUTATIONS = (
    Mutation(
        "gradients of adapters stay partial under sequence parallelism",
        "core.transformer.lora._WholeLinear.__init__",
        r"sequence_parallel=config\.sequence_parallel",
        "sequence_parallel=False",
        ("tests/unit/transformer/test_lora.py",),
    ),
    Mutation(
        "positions of a context-parallel rank count from zero",
        "core.transformer.sequences.own_positions",
        "return .*",
        "return torch.arange(length, device=device)",
        ("tests/unit/transformer/test_sequences.py",),
    ),
    Mutation(
        "keys and values get no gradient from queries of other ranks",
        "core.transformer.piecewise_attention._backward",
        r"(?<= total\.add_\()part",
        "part, alpha=0",
        ("tests/unit/transformer/test_sequences.py",),
    ),
    Mutation(
        "documents are joined at the edge of a chunk",
        "core.transformer.sequences._pieces_of",
        r"slice\(begin, ",
        "slice(0, ",
        ("tests/unit/transformer/test_sequences.py",),
    ),
    Mutation(
        "attention drops the same weights on every tensor-parallel rank",
        "core.transformer.dot_product_attention.DotProductAttention.forward",
        r"get_rng_tracker\(\)\.fork\(\)",
        "nullcontext()",
        ("tests/unit/transformer/test_dropout.py",),
    ),
    Mutation(
        "RMSNorm forgets its weight",
        "core.transformer.norms.RMSNorm.forward",
        r"self\.weight, self\.eps\)$",
        "self.weight.detach(), self.eps)",
        ("tests/unit/transformer/test_norms.py",),
    ),
    # ---- experts
    Mutation(
        "experts: a forward that raised leaves its counts",
        "core.transformer.moe.load_balancing.keep",
        r"output\.register_hook\(come\)",
        "come()",
        (_BALANCING,),
    ),
    Mutation(
        "experts: a recomputation reads the counts of now",
        "core.transformer.moe.router.TopKRouter._count_on_replicas",
        r"noted\(count\)",
        "count()",
        (_BALANCING,),
    ),
    Mutation(
        "experts: micro-batches whose backward has not come are not counted",
        "core.transformer.moe.router.TopKRouter._count_on_replicas",
        r"if note\.counts_in_step",
        "if False",
        (_BALANCING,),
    ),
    Mutation(
        "experts: counts of a cleared step are in the next one",
        "core.transformer.moe.router.TopKRouter.clear_step",
        r"counts_in_step = False",
        "counts_in_step = True",
        (_BALANCING,),
    ),
    Mutation(
        "experts: a forward is given the losses of others",
        "core.transformer.moe.load_balancing.pop_balance_loss",
        r"forward in \(None, note\.forward\)",
        "True",
        (_BALANCING,),
    ),
    Mutation(
        "experts: losses of several forwards are taken as one's",
        "core.transformer.moe.load_balancing.add_auxiliary_losses",
        r"len\(waiting\) > 1",
        "False",
        (_BALANCING,),
    ),
    Mutation(
        "experts: another backward through a kept graph counts again",
        "core.transformer.moe.load_balancing.keep",
        r"waiting\.pop\(\)\(\)",
        "waiting[0](); break",
        (_BALANCING,),
    ),
    Mutation(
        "experts: ranks jitter their parts of a sequence equally",
        "core.transformer.moe.router.TopKRouter._add_jitter",
        r"stream = MODEL_PARALLEL_RNG",
        "pass",
        ("tests/unit/transformer/moe/test_router.py",),
    ),
    Mutation(
        "experts: gradients of biases are rounded at each addition",
        "core.transformer.moe.experts._RowsOfExperts.backward",
        r"\(is_row_of @ grad\.to\(wide\)\)",
        "sum(one.to(grad.dtype).unsqueeze(1) * row for one, row in zip(is_row_of.t(), grad))",
        ("tests/unit/transformer/moe/test_experts.py",),
    ),
    Mutation(
        "experts: tokens without a label have weight",
        "core.transformer.moe.load_balancing._WithLosses.backward",
        r"grad if has_loss is None else grad\.masked_fill\(~has_loss, 0\.0\)",
        "grad",
        (_BALANCING,),
    ),
    Mutation(
        "experts: balancing losses have no gradient",
        "core.transformer.moe.load_balancing._WithLosses.backward",
        r"weight\.to\(device, dtype\)",
        "torch.zeros((), device=device, dtype=dtype)",
        (_BALANCING,),
    ),
    Mutation(
        "experts: a balancing loss weighs one, whatever its tokens weigh",
        "core.transformer.moe.load_balancing._WithLosses.backward",
        r"grad_of_tokens\.sum\(dtype=torch\.float64\)",
        "torch.ones((), dtype=torch.float64)",
        (_BALANCING,),
    ),
    Mutation(
        "experts: a coefficient only switches its loss on",
        "core.transformer.moe.router.TopKRouter._auxiliary_losses",
        r"coefficient \* loss",
        "loss",
        (_BALANCING,),
    ),
    Mutation(
        "experts: parts of a sequence weigh their own tokens",
        "core.transformer.moe.load_balancing._WithLosses.backward",
        r"all_reduce_by_backend\(weight, .*\)",
        "pass",
        (_EXPERTS_OF_RANKS,),
    ),
    Mutation(
        "experts: each tensor-parallel rank adds the whole balancing loss",
        "core.transformer.moe.router.TopKRouter._note",
        r"loss / group_size\(self\.tp_group\)",
        "loss",
        (_EXPERTS_OF_RANKS,),
    ),
    Mutation(
        "experts: the router learns from balancing losses alone",
        "core.transformer.moe.dispatch._combine",
        r"probs\.unsqueeze\(-1\)",
        "probs.detach().unsqueeze(-1)",
        (_MOE_LAYER,),
    ),
    Mutation(
        "experts: outputs have the probabilities of a token's other experts",
        "core.transformer.moe.dispatch._combine",
        r"probs\.unsqueeze\(-1\)",
        "probs.flip(-1).unsqueeze(-1)",
        (_MOE_LAYER,),
    ),
    Mutation(
        "experts: probabilities have the bias of the choice",
        "core.transformer.moe.router.choose_experts",
        r"probs = scores\.gather\(1, experts\)",
        "probs = (scores if expert_bias is None else scores + expert_bias).gather(1, experts)",
        ("tests/unit/transformer/moe/test_router.py",),
    ),
    Mutation(
        "experts: rows of no expert keep what was in memory",
        "core.transformer.moe.experts.grouped_matmul",
        r"output if is_dropped is None else output\.masked_fill\(is_dropped, 0\.0\)",
        "output",
        ("tests/unit/transformer/moe/test_experts.py",),
    ),
    Mutation(
        "experts: all experts of a layer start alike",
        "core.transformer.moe.experts.EachExpert.__call__",
        r"generator\.initial_seed\(\) \+ index",
        "generator.initial_seed()",
        ("tests/unit/transformer/moe/test_experts.py",),
    ),
    Mutation(
        "experts: a cast of the model rounds biases",
        "core.transformer.moe.router.TopKRouter._apply",
        r"self\._buffers\[name\] = .*",
        "pass",
        ("tests/unit/transformer/moe/test_router.py",),
    ),
    Mutation(
        "experts: biases move towards the load",
        "core.transformer.moe.moe_layer.MoELayer.use_step_sums",
        r"counts\.mean\(\) - counts",
        "counts - counts.mean()",
        ("tests/unit/transformer/moe/test_moe_layer.py",),
    ),
    Mutation(
        "experts: probabilities reach other ranks without a gradient",
        "core.transformer.moe.dispatch.gather_tokens",
        r"gather_from_sequence_parallel_region\(probs,",
        "gather_from_sequence_parallel_region(probs.detach(),",
        (_DISPATCH,),
    ),
    Mutation(
        "experts: the router's scores have the gradient of one rank's experts",
        "core.transformer.moe.dispatch.gather_tokens",
        r"gather_from_sequence_parallel_region\(probs,",
        "gather_from_sequence_parallel_region(probs, False,",
        (_DISPATCH,),
    ),
    Mutation(
        "experts: outputs return to other tokens",
        "core.transformer.moe.dispatch._compute_elsewhere",
        r"by_expert\.from_rows\((compute\(.*?\))\)\.squeeze\(1\)",
        r"\1",
        (_DISPATCH,),
    ),
    Mutation(
        "experts: each rank has the first rank's experts of a stock model",
        "core.transformer.moe.experts._cut",
        r"\[rank\]",
        "[0]",
        ("tests/unit/distributed/test_hugging_face_experts.py::test_each_rank_has_its_experts_of_a_whole_model",),
    ),
    # ---- streams
    Mutation(
        "streams: keys are used before they are gathered",
        "core.transformer.sequences.start_gathering_keys",
        r"work\.wait\(\)",
        "pass",
        (STREAMS_OF_LAYERS,),
    ),
    Mutation(
        "streams: gradients of keys are used before they are added up",
        "core.transformer.sequences.start_scattering_gradients",
        r"work\.wait\(\)",
        "pass",
        (STREAMS_OF_LAYERS,),
    ),
)
