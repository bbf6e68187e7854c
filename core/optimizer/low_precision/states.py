"""What an update rule keeps in fewer than 32 bits, of all its parameters, and the updates of these."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...base.device import current_device, is_on_gpu
from ...base.dtypes import dtype_name
from ...base.errors import ConfigError
from ..main_params import MainParam
from ..optimizer_config import OptimizerConfig, StateDtype
from ..update_rules import CHUNK_ELEMENTS, MASTER, Kernel, SkippableRule, ensure_state, in_whole_vectors
from .places import Places
from .stored import CHUNK, InBlocks, Rounded, SharedScales, Stored, WithRest

LEAST_ELEMENTS = 4096
"""A smaller tensor of the whole model has no blocks: its state stays in fp32, as in torchao and bitsandbytes."""


class StoredStates:
    """What an optimizer keeps of its parameters in fewer bits: columns, by parameter and kind.

    Args:
        params: of this rank. Their `main` is the key everywhere.
        group: the ranks that hold parts of the same parameters; None is this rank alone. All of them make an instance
            together, and add the same columns.
    """

    def __init__(self, params: Sequence[MainParam], group: dist.ProcessGroup | None) -> None:
        self._params, self._group = {p.main: p for p in params}, group
        # By main tensor and kind. `add` and `add_state` add.
        self._columns: dict[Tensor, dict[str, Stored]] = {main: {} for main in self._params}
        # What `for_checkpoint` has returned, into which a checkpoint may be loaded. `drop_copies` clears them.
        self._copies: dict[Stored, Tensor] = {}
        self.are_filled = False
        """Whether a checkpoint has filled copies. The optimizer sets it, and `drop_copies` clears it."""
        self._places: dict[Tensor, Places] = {p.main: Places(p.whole(p.main), p.main.device) for p in params}
        self.shared = SharedScales((), group, current_device())

    def add(self, main: Tensor, kind: str, dtype: StateDtype, *, rounds_stochastically: bool = False) -> Stored | None:
        """Returns a new column of zeros, or None where values stay in fp32. Call `agree_on_blocks` after the last one.

        Args:
            rounds_stochastically: 8 bits too, for what changes by far less than a step of theirs.
        """
        p = self._params[main]
        if dtype == "fp32" or (dtype != "bf16" and p.whole(main).numel() < LEAST_ELEMENTS):
            return None
        _check_dtype(p, f"{kind} is to be kept in {dtype}", (torch.float32, torch.bfloat16, torch.float16))
        memory = torch.zeros(
            main.numel(), dtype=torch.bfloat16 if dtype == "bf16" else torch.uint8, device=main.device
        )
        places, name, is_signed = self._places[main], f"{kind}.{p.name}", kind != "exp_avg_sq"
        self._columns[main][kind] = column = (
            Rounded(memory, places, name)
            if dtype == "bf16"
            else InBlocks(memory, places, name, dtype, is_signed, rounds_stochastically)
        )
        return column

    def add_state(self, config: OptimizerConfig, rule: SkippableRule) -> None:
        """Adds the moments and the masters that a config keeps in fewer bits. Their memory is in the rule's state."""
        for main, p in self._params.items():
            state, columns = rule.state[main], self._columns[main]
            for kind in rule.state_names_of(main):
                dtype = config.exp_avg_sq_dtype if kind == "exp_avg_sq" else config.exp_avg_dtype
                if (column := self.add(main, kind, dtype)) is not None:
                    state[kind] = column.values.view(main.shape)
            if p.is_low_precision and not p.has_master:
                _check_dtype(p, f"main_params_dtype is {config.main_params_dtype}", (torch.bfloat16,))
                if not main.is_contiguous():
                    raise ConfigError(
                        f"main_params_dtype is {config.main_params_dtype}, and parameter {p.name} is not contiguous; "
                        "make it so before the model is wrapped, or leave it at fp32"
                    )
                kept = WithRest if config.main_params_dtype == "bf16_with_rest" else Rounded
                columns[MASTER] = kept(main.view(-1), self._places[main], f"{MASTER}.{p.name}")
                p.rest = columns[MASTER].tensors().get("rest")
            for kind, column in columns.items():
                state.update({f"{kind}.{part}": tensor for part, tensor in column.tensors().items()})
        self.agree_on_blocks()

    def agree_on_blocks(self) -> None:
        """Finds the blocks that are cut over ranks. All ranks call it."""
        columns = [column for columns in self._columns.values() for column in columns.values()]
        self.shared = SharedScales(columns, self._group, current_device())

    def column(self, main: Tensor, kind: str) -> Stored | None:
        """Returns what keeps a tensor of a parameter, or None if that is kept in fp32."""
        return self._columns[main].get(kind)

    def read(self, main: Tensor, kind: str) -> Tensor | None:
        """Returns a tensor of a parameter in fp32, in memory of its own and the parameter's shape."""
        column = self.column(main, kind)
        return None if column is None else column.read_all().view(main.shape)

    def write(self, main: Tensor, kind: str, values: Tensor, step: int) -> None:
        """Stores what `read` returned, after it was changed."""
        if (column := self.column(main, kind)) is not None:
            column.write_all(values, step)

    def update(
        self, kernel: Kernel, rule: SkippableRule, pairs: list[list[Tensor]], names: Sequence[str]
    ) -> list[list[Tensor]]:
        """Updates the parameters that have a column here. Returns the other pairs. Arguments as `_update`'s."""
        left = []
        for p, grad in pairs:
            if self._columns[p].keys() & {MASTER, *names}:
                rule.move_to(p.device)
                self._update_one(kernel, rule, p, grad, names)
            else:
                left.append([p, grad])
        return left

    def _update_one(self, kernel: Kernel, rule: SkippableRule, p: Tensor, grad: Tensor, names: Sequence[str]) -> None:
        """Runs the kernel on the columns of a parameter in fp32, a chunk at a time, and stores what it has written."""
        columns, state = self._columns[p], ensure_state(rule, p, tuple(names))
        plain = {MASTER: p} | {name: state[name] for name in names}
        sources = [columns.get(kind, tensor.reshape(-1)) for kind, tensor in plain.items()]
        grads = grad.reshape(-1)
        for start, end in self._places[p].chunks(CHUNK if is_on_gpu(p) else CHUNK_ELEMENTS):
            main, *others = (one.read(start, end) if isinstance(one, Stored) else one[start:end] for one in sources)
            in_whole_vectors(kernel, [[main, *rule.as_read([grads[start:end]], torch.float32), *others]])
            for source, new in zip(sources, (main, *others), strict=True):
                if isinstance(source, Stored):
                    source.write(start, end, new, state["step"])
        for tensor, source in zip(plain.values(), sources, strict=True):
            if isinstance(source, Tensor) and not tensor.is_contiguous():
                tensor.copy_(source.view(tensor.shape))

    def tensors(self, params: Iterable[MainParam]) -> Iterator[Tensor]:
        """Yields the memory of the columns of some parameters, but for the parameters themselves."""
        for p in params:
            for kind, column in self._columns[p.main].items():
                yield from column.tensors().values()
                if kind != MASTER:
                    yield column.values

    def for_checkpoint(self, main: Tensor, kind: str, plain: Tensor) -> Tensor:
        """Returns a tensor of a parameter in fp32: a copy on the host, which `take_copies` stores, or `plain`.

        The copy is the same until they are taken or dropped.
        """
        column = self.column(main, kind)
        if column is None:
            return plain
        if column not in self._copies:
            self._copies[column] = torch.empty(main.shape)
        if not self.are_filled:
            self._copies[column].copy_(column.read_all().view(main.shape))
        return self._copies[column]

    def take_copies(self) -> None:
        """Stores what was loaded into copies of `for_checkpoint`. All ranks call it."""
        for column, copy in self._copies.items():
            column.write_all(copy, 0)
        self.drop_copies()
        self.shared.agree()

    def drop_copies(self) -> None:
        """Frees copies, which an update makes old."""
        self._copies, self.are_filled = {}, False


def _check_dtype(p: MainParam, what: str, dtypes: tuple[torch.dtype, ...]) -> None:
    if (dtype := p.local().dtype) not in dtypes:
        raise ConfigError(
            f"{what}, and parameter {p.name} is in {dtype_name(dtype)}; that takes "
            f"{' or '.join(map(dtype_name, dtypes))}: cast the model, or leave it at fp32"
        )
