"""Whether the numbers of a model change under any wrapper: ``python -m core.verify my_module:build``.

Any model is trained under every wrapper in turn, in lockstep with plain replicas, which are themselves
compared with one process that goes through the micro-batches of all ranks. What parts is named: the first step, and
the first parameter whose gradient or weight differs.

    model_under_test    the user's function, imported, called and checked
    trainings           a training that can be stopped between backward and update, and read as whole tensors
    lockstep            two trainings side by side, up to where they part
    __main__            the command
"""

from .lockstep import Options, Parting, Verdict, verify
from .model_under_test import ModelUnderTest, load_model_under_test

__all__ = ["Options", "Parting", "ModelUnderTest", "Verdict", "load_model_under_test", "verify"]
