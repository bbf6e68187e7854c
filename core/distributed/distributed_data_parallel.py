"""Replicas on contiguous buffers. Optionally shards optimizer state (ZeRO-1) and gradients (ZeRO-2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from torch import Tensor, nn

from ..base.errors import ParallelConfigError
from ..base.module_protocol import unwrap_model
from ..process_groups_config import ProcessGroupCollection
from .data_parallel_base import _BaseDataParallel
from .distributed_data_parallel_config import DistributedDataParallelConfig, EngineKind
from .flat.bucket import Bucket
from .flat.buffer import FlatBuffer
from .flat.flat_engine import FlatEngine
from .flat.whole_parameters import WholeParameters
from .groups import Ranks
from .guards import Guard
from .plan import Plan
from .plan.layout import FullParamLayout
from .plan.units import UnitChoice
from .step import Step


class DistributedDataParallel(_BaseDataParallel):
    """Replicates the model on every rank, and reduces gradients over the group once a step, in flat buffers.

    After `finish_grad_sync` a rank has, by sharding strategy:

    * ``no_shard``: the whole averaged gradient in ``param.main_grad``. If dtypes are equal, ``param.grad`` shares its
      memory, and any optimizer and `torch.nn.utils.clip_grad_norm_` may read and write it there;
    * ``optim`` (ZeRO-1): the reduced gradient of its shard of each bucket, inside the buffer of whole gradients. The
      rest of ``main_grad`` is not reduced: do not read it;
    * ``optim_grads`` (ZeRO-2): only its shard. A bucket's whole gradient is allocated when backward reaches the bucket
      and freed when it is reduced, during the last micro-batch's backward (or kept for the next step, where
      ``reproducible_across_ranks`` keeps partial sums); ``main_grad`` is then None.

    With the last two, parameters are views of flat buffers, an optimizer of `shardstack.optimizer` updates this rank's
    shards, and `start_param_sync` gathers the parameters. Backward moves each gradient into ``main_grad`` and frees
    ``param.grad``. A layer that adds its gradient into ``main_grad`` itself sets ``param.grad_added_to_main_grad``;
    the wrapper resets it after each use. ``main_grad`` is None between `zero_grad_buffer` and the first gradient.

    Args:
        config: the model's config. ``calculate_per_token_loss`` and ``gradient_accumulation_fusion`` are read if
            present. The latter lets the layers of this package compute gradients in place. In the config of another
            package it means that layers add into ``main_grad`` themselves, which then always exists.
        ddp_config: the wrapper's settings.
        module: the model. All ranks start from the values of the group's first rank; a model on the meta device is
            materialized.
        disable_bucketing: reduce each buffer in one piece, regardless of the bucket size.
        pg_collection: process groups; its `dp_cp` (or `dp`) serves as `process_group`.
        full_param_layout: from `DistributedOptimizer.compute_full_param_layout`; must equal the layout that the
            wrapper computes.
        sub_modules_to_wrap: as in `TorchFullyShardedDataParallel`; here chooses the modules that are recomputed or
            compiled (``activation_checkpointing``, ``compile_units``).
        process_group: the ranks that hold replicas, or a mesh of them, (replicate, shard) for hybrid sharding. Given,
            `shardstack.parallel_state` is not touched; by default it is the data-parallel group with context
            parallelism.
        finish_in_backward: finish gradients at the end of each backward outside `no_sync`, as torch's DDP does, and
            leave them in ``param.grad``. A backward that finds gradients adds to them; one after they were set to
            None (``zero_grad``) starts from zero, as does one after a backward that raised.

    Raises:
        ParallelConfigError: a field that this wrapper cannot honour, or half precision with fp32 parameters.
        WrapError: a parameter that is a DTensor already.
    """

    engine: FlatEngine
    engine_kind = EngineKind.FLAT_BUFFERS

    def __init__(
        self,
        config: Any,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        disable_bucketing: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
        full_param_layout: FullParamLayout | None = None,
        *,
        sub_modules_to_wrap: Iterable[UnitChoice] | None = None,
        process_group: Ranks | None = None,
        finish_in_backward: bool = False,
    ) -> None:
        super().__init__(
            config,
            ddp_config,
            module,
            sub_modules_to_wrap,
            process_group,
            pg_collection,
            guards=(_GivenLayout(full_param_layout),),
            disable_bucketing=disable_bucketing,
            finish_in_backward=finish_in_backward,
        )
        finish = self.finish_grad_sync if finish_in_backward else None
        self._set_engine(FlatEngine(self.plan, module, unwrap_model(module), self.step, finish))
        if self.plan.settings.overlap_param_gather:
            self.enable_forward_pre_hook()

    @property
    def _parameters_of_engine(self) -> WholeParameters:
        return cast(WholeParameters, self.engine.parameters)

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Gathers updated parameters, in the order in which forward reads them.

        With ``overlap_param_gather`` it returns at once, and a module's forward waits for the parameters it holds.

        Args:
            force_sync: return only when all parameters are gathered.
            force_dispatch: Megatron-LM's; ignored, because the gather is always started.
        """
        for guard in self.guards:
            guard.before_reduction(self.engine)
        self._parameters_of_engine.publish(waits=force_sync)

    def finish_param_sync(self) -> None:
        """Waits for parameters that are still being gathered."""
        self.engine.parameters.settle()

    def free_overlap_buffers(self) -> None:
        """Waits for gathers, by Megatron-LM's name. They write into the buffers, so that nothing is freed."""
        self.finish_param_sync()

    def enable_forward_pre_hook(self) -> None:
        """Lets parameters be gathered while forward runs: each module's forward waits for those that it reads."""
        self._parameters_of_engine.enable_hooks()

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Takes the hooks away, as for an evaluation that reads parameters outside of forward.

        Args:
            param_sync: wait for what is still being gathered; without it the caller must, by `finish_param_sync`.
        """
        self._parameters_of_engine.disable_hooks()
        if param_sync:
            self.finish_param_sync()

    # ---- buffers, by Megatron-LM's names

    def _views(self, of_experts: bool) -> list[ParamAndGradBuffer]:
        return [
            ParamAndGradBuffer(
                buffer,
                [bucket for bucket in self.engine.bucket_at.values() if bucket.buffer is buffer],
                self.ddp_config,
            )
            for buffer in self.engine.buffers
            if (buffer.kind.kind == "expert") is of_experts
        ]

    @property
    def buffers(self) -> BufferList:
        """The flat buffers, in a list, but for those of experts. Calling it returns torch's ``Module.buffers()``."""
        return BufferList(self._views(False), lambda *args, **kwargs: nn.Module.buffers(self, *args, **kwargs))

    @property
    def expert_parallel_buffers(self) -> list[ParamAndGradBuffer]:
        """The flat buffers of parameters that carry Megatron-LM's mark of experts."""
        return self._views(True)

    @property
    def bucket_groups(self) -> list[Bucket]:
        """The buckets of `buffers`, in the order in which they leave."""
        return [bucket for bucket in self.engine.buckets if bucket.buffer.kind.kind != "expert"]

    @property
    def expert_parallel_bucket_groups(self) -> list[Bucket]:
        """The buckets of `expert_parallel_buffers`, in the order in which they leave."""
        return [bucket for bucket in self.engine.buckets if bucket.buffer.kind.kind == "expert"]


class _GivenLayout(Guard):
    """The layout of buffers is the one that the caller has computed, if any."""

    def __init__(self, layout: FullParamLayout | None) -> None:
        self._layout = layout

    def at_plan(self, plan: Plan, step: Step) -> None:
        planned = tuple(tuple(bucket.layout for bucket in buckets) for buckets in plan.buffers)
        if self._layout not in (None, planned):
            raise ParallelConfigError(
                "full_param_layout is not the layout of this model's buffers; compute it from the same parameters, "
                "bucket_size, number of ranks and ddp_config, or leave it out"
            )


class ParamAndGradBuffer:
    """One flat buffer under Megatron-LM's names, for scripts and for Megatron-LM's optimizers: the library never uses
    it.

    It has ``params``, ``param_data``, ``grad_data``, ``numel``, ``buckets``, ``param_index_map`` and what
    `DistributedOptimizer` of Megatron-LM reads. A bucket has ``params``, ``param_data``, ``grad_data``, ``offset`` and
    ``param_to_index``. A bucket group, which here is the bucket itself, also has ``buckets``, ``start_grad_sync`` and
    ``finish_grad_sync``.
    """

    def __init__(self, buffer: FlatBuffer, buckets: list[Bucket], ddp_config: Any) -> None:
        # Made anew at each access. The memory is the `FlatBuffer`'s, and changes with each step.
        self.buckets, self.params = buckets, [param for bucket in buckets for param in bucket.params]
        self.param_data, self.grad_data, self.numel = buffer.param_data, buffer.grad_data, buffer.numel
        self.param_dtype, self.grad_dtype = buffer.kind.param_dtype, buffer.kind.grad_dtype
        self.ddp_config, self.data_parallel_group = ddp_config, buffer.plan.groups.shard
        self.data_parallel_world_size, self.num_optimizer_shards = self.data_parallel_group.size(), None
        self.numel_unpadded = sum(bucket.numel_unpadded for bucket in buckets)
        self.param_indices = list(range(len(self.params)))

    @property
    def param_index_map(self) -> dict[nn.Parameter, tuple[int, int, int]]:
        """``(start, end, number of the bucket)`` of each parameter in the buffer."""
        return {
            param: (bucket.offset + start, bucket.offset + end, number)
            for number, bucket in enumerate(self.buckets)
            for param, (start, end) in bucket.param_to_index.items()
        }


class BufferList(list[ParamAndGradBuffer]):
    """The flat buffers of a wrapper. Calling the list returns torch's ``Module.buffers()``."""

    def __init__(self, items: list[ParamAndGradBuffer], torch_buffers: Callable[..., Iterator[Tensor]]) -> None:
        super().__init__(items)
        # Fixed: torch's ``Module.buffers`` of the wrapper. The list lives as long as its reader keeps it.
        self._torch_buffers = torch_buffers

    def __call__(self, *args: Any, **kwargs: Any) -> Iterator[Tensor]:
        return self._torch_buffers(*args, **kwargs)
