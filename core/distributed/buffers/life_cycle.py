"""The states of gradients on flat buffers: of a bucket in a step, and of each parameter's place in the bucket.

Every change of state is a method here. `BucketGroup` calls those of `BucketPhase`, `GradSlot` those of `Content`;
autograd's thread during a backward, the main thread between steps, never both at once.
"""

from __future__ import annotations

from enum import Enum


class BucketPhase(Enum):
    """The state of one bucket in a step::

        FILLING ---> SENT ---> REFILLING ---> SENT ...
           ^          |            |
           |          +---> LATE   |
           +----------+------+-----+

    REFILLING exists only where each micro-batch is reduced, LATE only where a step is reduced once.
    """

    FILLING = "filling"
    """Gradients add up on this rank, and the shard counts as zeros: what is in its memory is of an earlier step.

    Begins with the bucket, with each step (`BucketGroup.clear_grads`, `reset`), and where a backward adds to gradients
    that were reduced (`open_again`). Ends with `start_grad_sync`.
    """

    SENT = "sent"
    """The sum of this rank was sent: it is reduced into the shard, or will be once `wait_for_grads` has returned.

    Begins with `start_grad_sync`. Ends with the next micro-batch, a gradient that comes too late, or the step.
    """

    REFILLING = "refilling"
    """The gradients of a further micro-batch are being computed, to be added to what the shard has.

    Begins for all buckets with the first gradient of a backward, so that all ranks send each bucket once per backward.
    Ends with `start_grad_sync`.
    """

    LATE = "late"
    """A gradient came after SENT and was dropped: `finish_grad_sync` raises. Ends with the step."""

    @property
    def has_reduced(self) -> bool:
        """Whether the shard has gradients of this step, or is about to."""
        return self is not BucketPhase.FILLING

    @property
    def has_left(self) -> bool:
        """Whether the gradients were sent, and no further micro-batch is being added to them."""
        return self in (BucketPhase.SENT, BucketPhase.LATE)

    def begun(self, reduces_each: bool) -> BucketPhase:
        """Returns the phase once a gradient, or another bucket's, has come.

        Args:
            reduces_each: each micro-batch is reduced on its own.
        """
        if self is BucketPhase.SENT:
            return BucketPhase.REFILLING if reduces_each else BucketPhase.LATE
        return self

    def sent(self) -> BucketPhase:
        """Returns the phase once the bucket has left, complete or not."""
        return self if self is BucketPhase.LATE else BucketPhase.SENT

    def restarted(self) -> BucketPhase:
        """Returns the phase with which a step begins."""
        return BucketPhase.FILLING


class Content(Enum):
    """The contents of the memory of one parameter's gradient on this rank::

        STALE ---> LENT ---> GRADIENT ---> SENT
          |                   ^    ^
          +-------------------+    |
          +---> ZEROS -------------+

    SENT continues as STALE does, and each step begins with STALE.
    """

    STALE = "stale"
    """Nothing, or values of an earlier step: the first gradient is copied over them. ``main_grad`` is None.

    Set by `GradSlot.clear` at the beginning of a step, and by `release` where no gradient had come. It ends when one
    comes, and when zeros are needed: for a layer that adds, or to send a bucket whose gradients are incomplete.
    """

    LENT = "lent"
    """A layer's backward computes the gradient there (`GradSlot.lend`), which ends with that gradient.

    Without it, after a backward that raised, it ends when the step is cleared or its bucket is sent.
    """

    ZEROS = "zeros"
    """Zeros, to which the first gradient is added: of a new buffer, so that what is written there before a backward
    counts, or for a layer that adds in its own backward. Ends with a gradient, or with the step."""

    GRADIENT = "gradient"
    """The sum of what has come, to which the next gradient is added. Ends with `release` or with the step."""

    SENT = "sent"
    """Nothing: a gradient had come, its bucket was sent, and the memory released. Otherwise like STALE."""

    @property
    def counts(self) -> bool:
        """Whether the next gradient is added to what is in memory, rather than copied over it."""
        return self in (Content.ZEROS, Content.GRADIENT)

    @property
    def has_arrived(self) -> bool:
        """Whether a gradient has come in this step."""
        return self in (Content.GRADIENT, Content.SENT)

    def lent(self) -> Content:
        """Returns the content while a layer computes there; only of memory that does not count."""
        return Content.LENT

    def returned(self) -> Content:
        """Returns the content once a gradient has come, and is about to be stored."""
        return Content.STALE if self is Content.LENT else self

    def added(self) -> Content:
        """Returns the content once a gradient is stored."""
        return Content.GRADIENT

    def zeroed(self) -> Content:
        """Returns the content once memory that did not count was made zero."""
        return Content.GRADIENT if self.has_arrived else Content.ZEROS

    def released(self) -> Content:
        """Returns the content once its memory is gone."""
        return Content.SENT if self.has_arrived else Content.STALE

    def cleared(self) -> Content:
        """Returns the content with which a step begins."""
        return Content.STALE
