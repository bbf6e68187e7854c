"""The faults, in files that are named after the folders and modules of `core` whose functions they change."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from tests.mutation.mutation import Mutation

AREAS: dict[str, tuple[Mutation, ...]] = {
    area.name: import_module(f"{__name__}.{area.name}").MUTATIONS for area in iter_modules(__path__)
}
"""Faults by the file that has them: those of `optimizer.py` change `core.optimizer`."""

MUTATIONS = tuple(mutation for mutations in AREAS.values() for mutation in mutations)
