"""Faults of `core.transformer`."""

from __future__ import annotations

from tests.mutation.mutation import Mutation
from tests.mutation.suites import LAYOUTS, STREAMS_OF_LAYERS

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
        "core.transformer.context_parallel.own_positions",
        "return .*",
        "return torch.arange(length, device=device)",
        ("tests/unit/transformer/test_context_parallel.py", LAYOUTS),
    ),
    Mutation(
        "keys and values get no gradient from queries of other ranks",
        "core.transformer.piecewise_attention._backward",
        r"(?<= total\.add_\()part",
        "part, alpha=0",
        ("tests/unit/transformer/test_context_parallel.py",),
    ),
    Mutation(
        "documents are joined at the edge of a chunk",
        "core.transformer.document_masks._pieces_of",
        r"slice\(begin, ",
        "slice(0, ",
        ("tests/unit/transformer/test_document_masks.py",),
    ),
    Mutation(
        "attention drops the same weights on every tensor-parallel rank",
        "core.transformer.dot_product_attention.DotProductAttention.forward",
        r"with get_rng_tracker\(\)\.fork\(\)",
        "with nullcontext()",
        ("tests/unit/transformer/test_dropout.py",),
    ),
    Mutation(
        "RMSNorm forgets its weight",
        "core.transformer.norms.RMSNorm.forward",
        r"self\.weight, self\.eps\)$",
        "self.weight.detach(), self.eps)",
        ("tests/unit/transformer/test_norms.py",),
    ),
    # ---- streams
    Mutation(
        "streams: keys are used before they are gathered",
        "core.transformer.context_parallel.GatheringKeys.wait",
        r"self\.work\.wait\(\)",
        "pass",
        (STREAMS_OF_LAYERS,),
    ),
    Mutation(
        "streams: gradients of keys are used before they are added up",
        "core.transformer.context_parallel.ScatteringGradients.wait",
        r"self\.work\.wait\(\)",
        "pass",
        (STREAMS_OF_LAYERS,),
    ),
)
