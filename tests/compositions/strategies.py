"""Compositions drawn by hypothesis, from the values of `AXES`."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.compositions.composition import AXES, LAYOUTS, WRAPPER_AXES, Composition

FAMILY = 8
"""Most wrappers that one training is drawn with: they share what they are compared with."""

COMPILES_ONE_OF = 60
"""So many wrappers are not compiled for each that is, because a compilation takes as long as all of them."""

ONE_STAGE = 8
"""So many trainings have one pipeline stage for each of a schedule's, with which many values mean nothing."""

OFTEN_REFUSED = ("whole_gradients", "memory", "zeroes")
FIRST_VALUE = 5
"""So many times the first value is drawn for each other one on these axes, of which a value is refused under most
wrappers."""


def families(most_ranks: int = 4) -> st.SearchStrategy[tuple[Composition, ...]]:
    """Draws a training under several wrappers; it shrinks to one, with the first value of each axis.

    What means nothing next to other values is not set.
    """
    layouts = tuple(name for name in AXES["layout"] if LAYOUTS[name].ranks <= most_ranks)
    axes = {axis: st.sampled_from(layouts if axis == "layout" else values) for axis, values in AXES.items()}
    axes["pipeline"] = st.sampled_from(AXES["pipeline"][:1] * ONE_STAGE + AXES["pipeline"][1:])
    axes["compiled"] = st.sampled_from(("no",) * COMPILES_ONE_OF + ("units",))
    axes |= {axis: st.sampled_from(AXES[axis][:1] * FIRST_VALUE + AXES[axis][1:]) for axis in OFTEN_REFUSED}
    training = st.fixed_dictionaries({axis: drawn for axis, drawn in axes.items() if axis not in WRAPPER_AXES})
    wrapper = st.fixed_dictionaries({axis: axes[axis] for axis in WRAPPER_AXES})
    wrappers = st.lists(wrapper, min_size=1, max_size=FAMILY)
    drawn = st.builds(lambda t, ws: _composed([t | w for w in ws]), training, wrappers)
    return drawn.filter(lambda family: max(composition.ranks for composition in family) <= most_ranks)


def _composed(drawn: list[dict[str, str]]) -> tuple[Composition, ...]:
    return tuple(dict.fromkeys(Composition(**values).settled() for values in drawn))
