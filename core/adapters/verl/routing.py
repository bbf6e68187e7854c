"""The experts of a mixture in verl's steps: recorded as log probabilities are computed (R2), and replayed (R2, R3)."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from verl.utils.ulysses import slice_input_tensor
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from ...base.errors import DataError
from ...base.module_protocol import unwrap_model
from ...transformer.moe.router_replay import is_router, record, replay

_ROUTES = "routed_experts"


class RoutedSteps(FSDPEngineWithLMHead):
    """A part of the engine, whose micro-batches take the experts of ``routed_experts``, `[tokens, layers, k]`.

    verl's workers say to its Megatron and VeOmni engines alone when to replay. Here the engine's own
    ``router_replay.mode`` says so, and an engine that only runs forward, as that of a reference policy, never does.
    """

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        """Runs a micro-batch.

        Raises:
            DataError: ``router_replay`` is set, and the batch has no experts to replay.
        """
        mode, routes = self.engine_config.router_replay.mode, micro_batch.get(_ROUTES, None)
        run = partial(super().forward_step, micro_batch, loss_function, forward_only)
        if mode == "disabled" or self.engine_config.forward_only:
            return run()
        if routes is not None:
            with replay(self.module, self._rows(routes.values())):
                return run()
        if mode == "R3" or not forward_only:
            source = "rollout.enable_rollout_routing_replay" if mode == "R3" else "compute_log_prob"
            raise DataError(f"router_replay.mode is {mode!r}, and a batch has no {_ROUTES}; {source} brings them")
        with record(self.module) as recorded:
            loss, output = run()
        offsets = micro_batch["input_ids"].offsets()
        rows = self._gather_and_unpad_packed(recorded[0].to(offsets.device), self._padding(int(offsets[-1])))
        output["model_output"][_ROUTES] = torch.nested.nested_tensor_from_jagged(rows.to(torch.int16), offsets)
        return loss, output

    def _padding(self, tokens: int) -> Any:
        """Returns how many tokens verl adds to a packed sequence, up to a bucket and to what Ulysses divides."""
        to_bucket = self._get_packed_pad_size(tokens)
        return to_bucket + -(tokens + to_bucket) % self.ulysses_sequence_parallel_size

    def _rows(self, routes: Tensor) -> Tensor:
        """Returns what each router replays: -1, its own choice, for padding and tokens whose experts are not known."""
        model: Any = unwrap_model(self.module)
        if routes.shape[1] == model.config.num_hidden_layers:  # of a server, which has rows for dense layers too
            routers = [name for name, module in model.named_modules() if is_router(module)]
            routes = routes[:, [int(re.findall(r"\.(\d+)\.", name)[0]) for name in routers]]
        ordered = routes.sort(-1).values
        is_unknown = (ordered[..., 1:] == ordered[..., :-1]).any(-1, keepdim=True)  # verl fills up with zeros
        rows = pad(routes.masked_fill(is_unknown, -1), (0, 0, 0, 0, 0, self._padding(len(routes))), value=-1)
        return slice_input_tensor(rows, dim=0, padding=False) if self.use_ulysses_sp else rows
