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
    """Gradients accumulate on this rank. The shard counts as zeros: its memory has values of an earlier step.

    Begins with the bucket, with each step (`BucketGroup.clear_grads`, `reset`), and where a backward adds to gradients
    that were reduced (`open_again`). Ends with `start_grad_sync`.
    """

    SENT = "sent"
    """This rank's sum was sent. The shard is valid once `wait_for_grads` has returned.

    Begins with `start_grad_sync`. Ends with the next micro-batch, a gradient that comes too late, or the step.
    """

    REFILLING = "refilling"
    """A further micro-batch computes gradients, which will be added to the shard.

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
        """Returns the phase after a gradient of this bucket or, with `reduces_each`, of any bucket has arrived.

        Args:
            reduces_each: each micro-batch is reduced on its own.
        """
        if self is BucketPhase.SENT:
            return BucketPhase.REFILLING if reduces_each else BucketPhase.LATE
        return self

    def sent(self) -> BucketPhase:
        """Returns the phase after the bucket was sent, complete or not."""
        return self if self is BucketPhase.LATE else BucketPhase.SENT

    def restarted(self) -> BucketPhase:
        """Returns the phase at the beginning of a step."""
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
    """Invalid: no memory, or values of an earlier step. The first gradient overwrites them. ``main_grad`` is None.

    Set by `GradSlot.clear` at the beginning of a step, and by `release` if no gradient had arrived. Ends when a
    gradient arrives, and when zeros are needed: for a layer that adds, or to send an incomplete bucket.
    """

    LENT = "lent"
    """A layer's backward computes the gradient in the memory (`GradSlot.lend`). Ends when the gradient arrives.

    After a backward that raised no gradient arrives: ends when gradients are cleared, or the bucket is sent.
    """

    ZEROS = "zeros"
    """Zeros, to which the first gradient is added. Set for a new buffer, so that values written before a backward
    count, and for a layer that adds in its own backward. Ends with a gradient, or with the step."""

    GRADIENT = "gradient"
    """The sum of the gradients so far, to which the next one is added. Ends with `release` or with the step."""

    SENT = "sent"
    """Invalid, because the gradient was sent and its memory released. Otherwise like STALE."""

    @property
    def counts(self) -> bool:
        """Whether the values in memory are valid: the next gradient is added to them, not copied over them."""
        return self in (Content.ZEROS, Content.GRADIENT)

    @property
    def has_arrived(self) -> bool:
        """Whether a gradient has arrived in this step."""
        return self in (Content.GRADIENT, Content.SENT)

    def lent(self) -> Content:
        """Returns the content while a layer computes in the memory, whose old values are invalid."""
        return Content.LENT

    def returned(self) -> Content:
        """Returns the content when a gradient has arrived and is about to be stored."""
        return Content.STALE if self is Content.LENT else self

    def added(self) -> Content:
        """Returns the content after a gradient was stored."""
        return Content.GRADIENT

    def zeroed(self) -> Content:
        """Returns the content after invalid memory was zeroed."""
        return Content.GRADIENT if self.has_arrived else Content.ZEROS

    def released(self) -> Content:
        """Returns the content after the memory was released."""
        return Content.SENT if self.has_arrived else Content.STALE

    def cleared(self) -> Content:
        """Returns the content at the beginning of a step."""
        return Content.STALE
