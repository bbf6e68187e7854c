"""What an update rule keeps in fewer than 32 bits, of all its parameters, and the updates of these."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...base.device import current_device, is_on_gpu
from ...base.dtypes import dtype_name
from ...base.errors import ConfigError
from .. import update_rules as rules
from ..main_params import MainParam
from ..optimizer_config import MainDtype, OptimizerConfig, StateDtype
from ..update_rules import Columns, Kernel, SkippableRule
from .places import Places
from .stored import CHUNK, InBlocks, Rounded, SharedScales, Stored, WithRest

LEAST_ELEMENTS = 4096
"""A smaller tensor of the whole model has no blocks: its state stays in fp32, as in torchao and bitsandbytes."""


class StoredStates(rules.PlainStates):
    """What an optimizer keeps of its parameters in fewer bits: columns, by parameter and kind.

    Args:
        params: of this rank. Their `main` is the key everywhere.
        group: the ranks that hold parts of the same parameters; None is this rank alone. All of them make an instance
            together, and add the same columns before its first update.
    """

    def __init__(self, params: Sequence[MainParam], group: dist.ProcessGroup | None) -> None:
        self._params, self._group = {p.main: p for p in params}, group
        self._places = {p.main: Places(p.whole(p.main), p.main.device) for p in params}
        # By main tensor and kind. `add` and `add_state` add.
        self._columns: dict[Tensor, dict[str, Stored]] = {main: {} for main in self._params}
        # Scales of blocks that are cut over ranks, of all columns. `add` sets it.
        self._shared: SharedScales
        # What `for_checkpoint` has returned, into which a checkpoint may be loaded. `settle` clears them.
        self._copies: dict[Stored, Tensor] = {}
        # Whether a checkpoint has filled copies. `note_loaded` sets it, and `settle` clears it.
        self._are_filled = False

    def add(
        self, dtypes: Mapping[tuple[Tensor, str], StateDtype], *, round_stochastically: bool = False
    ) -> Collection[tuple[Tensor, str]]:
        """Adds columns of zeros, by main tensor and kind, and returns those that do not stay in fp32. Collective.

        Args:
            round_stochastically: 8 bits too, for what changes by far less than a step of theirs.

        Raises:
            ConfigError: a dtype does not fit. Nothing is added.
        """
        added: dict[tuple[Tensor, str], Stored] = {}
        for (main, kind), dtype in dtypes.items():
            p = self._params[main]
            if dtype == "fp32" or (dtype != "bf16" and p.whole(main).numel() < LEAST_ELEMENTS):
                continue
            _check_dtype(p, f"{kind} is to be kept in {dtype}", (torch.float32, torch.bfloat16, torch.float16))
            codes = torch.bfloat16 if dtype == "bf16" else torch.uint8
            memory, name = torch.zeros(main.numel(), dtype=codes, device=main.device), f"{kind}.{p.name}"
            added[main, kind] = (
                Rounded(memory, self._places[main], name)
                if dtype == "bf16"
                else InBlocks(memory, self._places[main], name, dtype, kind != "exp_avg_sq", round_stochastically)
            )
        for (main, kind), column in added.items():
            self._columns[main][kind] = column
        columns = [column for of_main in self._columns.values() for column in of_main.values()]
        self._shared = SharedScales(columns, self._group, current_device())
        return added.keys()

    def add_state(self, config: OptimizerConfig, rule: SkippableRule) -> None:
        """Adds the moments and the masters that a config keeps in fewer bits. Their memory is in the rule's state."""
        dtypes = {kind: config.exp_avg_dtype for main in self._params for kind in rule.state_names_of(main)}
        dtypes["exp_avg_sq"] = config.exp_avg_sq_dtype
        self.add({(main, kind): dtypes[kind] for main in self._params for kind in rule.state_names_of(main)})
        for main, p in self._params.items():
            state, columns = rule.state[main], self._columns[main]
            state.update({kind: column.values.view(main.shape) for kind, column in columns.items()})
            if p.is_low_precision and not p.has_master:
                columns[rules.MASTER] = master = self._master(p, config.main_params_dtype)
                p.rest = master.parts.get("rest")
            for kind, column in columns.items():
                state.update({f"{kind}.{part}": tensor for part, tensor in column.parts.items()})

    def _master(self, p: MainParam, dtype: MainDtype) -> Stored:
        _check_dtype(p, f"main_params_dtype is {dtype}", (torch.bfloat16,))
        if not p.main.is_contiguous():
            raise ConfigError(
                f"main_params_dtype is {dtype}, and parameter {p.name} is not contiguous; make it so before the model "
                "is wrapped, or leave it at fp32"
            )
        kept = WithRest if dtype == "bf16_with_rest" else Rounded
        return kept(p.main.view(-1), self._places[p.main], f"{rules.MASTER}.{p.name}")

    def read(self, main: Tensor, kind: str, plain: Tensor) -> Tensor:
        column = self._columns[main].get(kind)
        return plain if column is None else column.read_all().view(main.shape)

    def write(self, main: Tensor, kind: str, values: Tensor, step: int) -> None:
        if (column := self._columns[main].get(kind)) is not None:
            column.write_all(values, step)

    def update(self, kernel: Kernel, rule: SkippableRule, pairs: Columns, names: Sequence[str]) -> Columns:
        plain = []
        for p, grad in pairs:
            if self._columns[p].keys() & {rules.MASTER, *names}:
                rule.move_to(p.device)
                self._update_one(kernel, rule, p, grad, names)
            else:
                plain.append([p, grad])
        return plain

    def _update_one(self, kernel: Kernel, rule: SkippableRule, p: Tensor, grad: Tensor, names: Sequence[str]) -> None:
        """Runs the kernel on the columns of a parameter in fp32, a chunk at a time, and stores what it has written."""
        columns, state = self._columns[p], rules.ensure_state(rule, p, names)
        plain = {rules.MASTER: p} | {name: state[name] for name in names}
        sources = [columns.get(kind, tensor.reshape(-1)) for kind, tensor in plain.items()]
        grads = grad.reshape(-1)
        for start, end in self._places[p].chunks(CHUNK if is_on_gpu(p) else rules.CHUNK_ELEMENTS):
            main, *others = (one.read(start, end) if isinstance(one, Stored) else one[start:end] for one in sources)
            rules.in_whole_vectors(kernel, [[main, *rule.as_read([grads[start:end]], torch.float32), *others]])
            for source, new in zip(sources, (main, *others), strict=True):
                if isinstance(source, Stored):
                    source.write(start, end, new, state["step"])
        for tensor, source in zip(plain.values(), sources, strict=True):
            if isinstance(source, Tensor) and not tensor.is_contiguous():
                tensor.copy_(source.view(tensor.shape))

    def settle(self) -> None:
        self._shared.agree()
        self._copies, self._are_filled = {}, False  # which the update has made old

    def for_checkpoint(self, main: Tensor, kind: str, plain: Tensor) -> Tensor:
        """Returns a tensor of a parameter in fp32: a copy on the host, the same until they are taken, or `plain`."""
        if (column := self._columns[main].get(kind)) is None:
            return plain
        if not self._are_filled or column not in self._copies:
            self._copies.setdefault(column, torch.empty(main.shape)).copy_(column.read_all().view(main.shape))
        return self._copies[column]

    def note_loaded(self) -> None:
        self._are_filled = True

    def take_copies(self) -> None:
        for column, copy in self._copies.items():
            column.write_all(copy, 0)
        self.settle()

    def tensors(self, params: Iterable[MainParam]) -> Iterator[Tensor]:
        for p in params:
            for kind, column in self._columns[p.main].items():
                yield from column.parts.values()
                if kind != rules.MASTER:
                    yield column.values


def _check_dtype(p: MainParam, what: str, dtypes: tuple[torch.dtype, ...]) -> None:
    if (dtype := p.local().dtype) not in dtypes:
        raise ConfigError(
            f"{what}, and parameter {p.name} is in {dtype_name(dtype)}; that takes "
            f"{' or '.join(map(dtype_name, dtypes))}: cast the model, or leave it at fp32"
        )
