"""What a fault is: a change of one place in one function of `core`, with the tests that have to fail."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One fault."""

    name: str
    function: str
    """Qualified name of the function, its module included."""
    pattern: str
    """Regular expression that matches once in the function's normalised source (`tests.mutation.plant.source_of`)."""
    replacement: str
    """What takes the place of the match, as for `re.sub`."""
    tests: tuple[str, ...]
    """Files or single tests; at least one has to fail."""
