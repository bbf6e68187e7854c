"""Checks that the numbers of a model are equal under every wrapper: ``python -m core.verify my_module:build``.

Trains a model under every wrapper in turn, in lockstep with plain replicas, which are themselves compared with one
process that runs the micro-batches of all ranks. Names the first difference: the step, and the parameter whose
gradient or weight differs.

    model_under_test    imports, calls and checks the user's function; trains its model, stopping before each update
    lockstep            compares two trainings step by step, up to the first difference
    __main__            the command
"""

from .lockstep import FirstDifference, Options, Verdict, verify
from .model_under_test import ModelUnderTest, load_model_under_test

__all__ = ["Options", "FirstDifference", "ModelUnderTest", "Verdict", "load_model_under_test", "verify"]
