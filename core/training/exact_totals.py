"""Totals over all micro-batches and ranks that do not depend on how ranks share the micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..comm.collectives import all_gather
from ..comm.host_read import HostRead


def exact_totals(rows: Sequence[Tensor], group: ProcessGroup) -> list[float]:
    """Sums each column over the rows of all ranks, rounded once, so that neither order nor place of a row shows.

    Args:
        rows: a row `[n]` for each micro-batch of this rank; every rank has as many.
    """
    own = torch.stack(list(rows)).double()
    gathered = own.new_empty(group.size() * own.numel())
    all_gather(gathered, own.flatten(), group, what="the losses of micro-batches")
    values, num_columns = HostRead(gathered).wait(), own.shape[1]
    return [math.fsum(values[column::num_columns]) for column in range(num_columns)]
