"""Says what torch's compiler lacks on this machine, from the errors that it raises."""

from __future__ import annotations

_REMEDIES = {
    "InvalidCxxCompiler": "install a C++ compiler (g++), or name one in CXX",
    "TritonMissing": "install triton, which torch's packages for CUDA bring along",
    "GPUTooOldForTriton": "compile for a newer GPU",
}
"""What to do about errors of torch's compiler, by the names of their types: importing these takes a second."""


def compiler_cause(error: BaseException) -> BaseException:
    """Returns the error that the compiler met, out of the one that torch raises around it; else the error itself."""
    cause: BaseException = getattr(error, "inner_exception", error)
    return cause


def missing_compiler(error: BaseException) -> tuple[str, str] | None:
    """Returns what torch says and what to do, if an error means that torch cannot compile here at all; else None."""
    cause = compiler_cause(error)
    remedy = _REMEDIES.get(type(cause).__name__)
    return None if remedy is None else (str(cause).splitlines()[0], remedy)
