"""Megatron-LM's arguments of wrappers, of `finalize_model_grads` and of optimizers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from core import parallel_state
from core.base.errors import ConfigError, ParallelConfigError, ShardstackError, WrapError
from core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    FullyShardedDataParallelConfig,
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
    finalize_model_grads,
    wrap_model,
)
from core.model_parallel_config import ModelParallelConfig
from core.optimizer import DistributedOptimizer, OptimizerConfig, ParamKey, get_megatron_optimizer
from core.process_groups_config import ProcessGroupCollection
from core.tensor_parallel import RowParallelLinear
from tests.unit._spawn import on_ranks

CONFIG = SimpleNamespace()
SETTINGS = {
    "ddp": DistributedDataParallelConfig(),
    "zero1": DistributedDataParallelConfig(use_distributed_optimizer=True),
    "zero2": DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads"),
    "fsdp2": TorchFullyShardedDataParallelConfig(),
}


class _Normed(nn.Module):
    """A weight that tensor-parallel ranks share and use on different tokens, and a layer with their group."""

    def __init__(self, layer_group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))
        self.gain.sequence_parallel = True
        self.row = None
        if layer_group is not None:
            config = ModelParallelConfig(2, sequence_parallel=True)
            self.row = RowParallelLinear(4, 4, config=config, init_method=nn.init.zeros_, tp_group=layer_group)

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return self.gain.sum() * factor


@pytest.mark.parametrize("setting", SETTINGS)
@on_ranks(2)
def test_sequence_parallel_gradients_need_a_group_to_be_summed(setting: str) -> None:
    """Sums over two tensor-parallel ranks, each alone among its replicas, without `parallel_state`."""
    assert not parallel_state.is_initialized()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    tp, dp = mesh.get_group("tp"), mesh.get_group("dp")
    ways = {"tp_group": {"tp_group": tp}, "pg_collection": {"pg_collection": ProcessGroupCollection(tp=tp)}}
    for way in ("tp_group", "pg_collection", "layers", "nothing"):
        model = wrap_model(_Normed(tp if way == "layers" else None), CONFIG, SETTINGS[setting], process_group=dp)
        model(torch.tensor(dist.get_rank() + 1.0)).backward()
        if way == "nothing":
            with pytest.raises(ParallelConfigError, match=r"the gradient of gain is a partial sum .* give .*tp_group"):
                finalize_model_grads([model])
        else:
            finalize_model_grads([model], **ways.get(way, {}))
            assert torch.equal(model.local_gradient(model.module.gain), torch.full((4,), 3.0)), way


@on_ranks(2)
def test_wrappers_take_a_collection_of_groups() -> None:
    parallel_state.initialize_model_parallel()
    whole = dist.group.WORLD
    for setting, kind in (("ddp", DistributedDataParallel), ("fsdp2", TorchFullyShardedDataParallel)):
        config = SETTINGS[setting]
        for groups in (ProcessGroupCollection(dp_cp=whole), ProcessGroupCollection(dp=whole)):
            assert kind(CONFIG, config, nn.Linear(2, 2), pg_collection=groups).process_group is whole
            assert wrap_model(nn.Linear(2, 2), CONFIG, config, pg_collection=groups).process_group is whole
        with pytest.raises(ParallelConfigError, match=r"pg_collection is a ProcessGroup.*goes to process_group"):
            kind(CONFIG, config, nn.Linear(2, 2), pg_collection=whole)
        with pytest.raises(ParallelConfigError, match="pg_collection has neither dp_cp nor dp"):
            kind(CONFIG, config, nn.Linear(2, 2), pg_collection=ProcessGroupCollection())
        with pytest.raises(ParallelConfigError, match="both given"):
            kind(CONFIG, config, nn.Linear(2, 2), pg_collection=ProcessGroupCollection(dp=whole), process_group=whole)


@on_ranks(2)
def test_layouts_are_known_before_there_are_buffers() -> None:
    parallel_state.initialize_model_parallel()
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=100, overlap_grad_reduce=True)
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
    model[0].weight.shared_embedding = True
    layout = DistributedOptimizer.compute_full_param_layout(list(model.parameters()), 100, 2, config)
    wrapped = DistributedDataParallel(CONFIG, config, model, full_param_layout=layout)
    (buffer,) = wrapped.buffers
    sizes = [[param.numel() for param in bucket.params] for bucket in buffer.buckets]
    assert sizes == [[10, 100], [10], [100]]  # the marked weight alone
    for bucket in buffer.buckets:
        for param in bucket.params:
            start, end, number = buffer.param_index_map[param]
            assert buffer.buckets[number] is bucket
            assert bucket.param_to_index[param] == (start - bucket.offset, end - bucket.offset)
    assert [group.params for group in wrapped.bucket_groups] == [bucket.params for bucket in buffer.buckets]
    other = DistributedOptimizer.compute_full_param_layout(list(model.parameters()), 50, 2, config)
    with pytest.raises(ParallelConfigError, match="full_param_layout is not the layout"):
        DistributedDataParallel(CONFIG, config, nn.Sequential(nn.Linear(10, 10)), full_param_layout=other)
    wrapped.free_overlap_buffers()
    assert not wrapped.expert_parallel_buffers and not wrapped.expert_parallel_bucket_groups


@on_ranks(2)
def test_whole_gradients_where_asked() -> None:
    parallel_state.initialize_model_parallel()
    model = wrap_model(nn.Linear(4, 4, bias=False), CONFIG, SETTINGS["zero1"])
    (model.module.weight.sum() * (dist.get_rank() + 1.0)).backward()
    finalize_model_grads([model], None, None, True)
    assert torch.equal(model.module.weight.main_grad, torch.full((4, 4), 1.5))  # both halves, on either rank


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"use_megatron_fsdp": True}, "DistributedDataParallelConfig: use_megatron_fsdp is True.*TorchFullySharded"),
        ({"fp8_param_gather": True}, "fp8_param_gather"),
    ],
)
def test_settings_of_wrappers_that_are_refused(given, message):
    for kind in (DistributedDataParallelConfig, TorchFullyShardedDataParallelConfig):
        with pytest.raises(ConfigError, match=message.replace("DistributedDataParallelConfig", kind.__name__)):
            kind(**given)
    assert DistributedDataParallelConfig(True, True).overlap_grad_reduce


def test_settings_of_optimizers():
    with pytest.raises(ConfigError, match=r"OptimizerConfig: apply_wd_to_qk_layernorm is True.*no_weight_decay_cond"):
        OptimizerConfig(apply_wd_to_qk_layernorm=True)
    with pytest.warns(UserWarning, match="OptimizerConfig ignores params_dtype"):
        config = OptimizerConfig(lr=0.1, params_dtype=torch.bfloat16)
    model = nn.Linear(2, 2)
    (group,) = get_megatron_optimizer(config, [model], {ParamKey(name="*"): {"wd_mult": 0.5}}).param_groups
    assert group["wd_mult"] == 0.5
    assert [param.data_ptr() for param in group["params"]] == [param.data_ptr() for param in model.parameters()]
    with pytest.raises(ImportError, match=r"ChainedOptimizer: one optimizer updates all chunks"):
        from core.optimizer import ChainedOptimizer  # noqa: F401


@on_ranks(2)
def test_lists_of_wrapped_models_are_asked_for() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = wrap_model(module, CONFIG, SETTINGS["ddp"], process_group=dist.group.WORLD)
    config = OptimizerConfig(optimizer="sgd", lr=0.1)
    asks = r"takes a list of wrapped models, \[model\] for a single one, and not parameters; it was given "
    for given, found in (
        (model, "a DistributedDataParallel"),
        (model.parameters(), "a list with a Parameter"),
        ([{"params": list(model.parameters())}], "a list with a dict"),
        ([], "a list"),
    ):
        with pytest.raises(ConfigError, match=f"^get_megatron_optimizer {asks}{found}"):
            get_megatron_optimizer(config, given)
        if not isinstance(given, list):
            given = model if given is model else model.parameters()
        with pytest.raises(ConfigError, match=f"^finalize_model_grads {asks}{found}"):
            finalize_model_grads(given)
    with pytest.raises(ConfigError, match=f"^finalize_model_grads {asks}a list with a Sequential"):
        finalize_model_grads([module])


class _Resized(nn.Module):
    """Has a method by the name of Hugging Face's, which changes the memory of the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens)).sum()

    def resize_token_embeddings(self, size: int) -> None:
        self.embedding.weight.data = torch.ones(size, 4)


@pytest.mark.parametrize("setting", [*SETTINGS, "zero3"])
@on_ranks(2)
def test_a_weight_that_is_resized_after_wrapping_is_named(setting: str) -> None:
    settings = SETTINGS.get(setting, FullyShardedDataParallelConfig())
    model = wrap_model(nn.Sequential(_Resized()), CONFIG, settings, process_group=dist.group.WORLD)
    with pytest.raises(WrapError, match=r"^resize_token_embeddings was called after the model was wrapped"):
        model.module[0].resize_token_embeddings(12)
    model(torch.arange(8)).backward()  # unchanged
    finalize_model_grads([model])
    model.zero_grad_buffer()
    if setting in ("ddp", "zero1", "zero2"):  # the others refuse the assignment itself
        model.module[0].embedding.weight.data = torch.ones(12, 4)
        with pytest.raises(WrapError, match=r"0.embedding.weight has the shape \[12, 4\], and had 32 elements when"):
            model(torch.arange(12)).backward()


@on_ranks(2)
def test_sharing_memory_of_a_model_on_fsdp2_is_refused() -> None:
    model = wrap_model(nn.Linear(4, 4), CONFIG, SETTINGS["fsdp2"], process_group=dist.group.WORLD)
    with pytest.raises(ShardstackError, match="share the plain model, and then wrap it"):
        model.share_memory()
