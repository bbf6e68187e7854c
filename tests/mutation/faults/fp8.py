"""Faults of `core.fp8`."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

_TESTS = "tests/unit/test_fp8.py"

MUTATIONS = (
    Mutation(
        "fp8: gradients have the format of weights",
        "core.fp8._Fp8.mm",
        r"self\.gradient_format",
        "_E4M3",
        (f"{_TESTS}::test_gradients_are_in_e5m2_in_tensorwise_alone",),
    ),
    Mutation(
        "fp8: a matrix of zeros is divided by its largest number",
        "core.fp8._Fp8._round",
        r"\.clamp\(min=.*?tiny\)",
        "",
        (f"{_TESTS}::test_zeros_and_no_rows_have_products",),
    ),
)
