"""GPTs under each wrapper, trained for a step, and the files that they are exported to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.distributed import (
    DistributedDataParallelConfig,
    FullyShardedDataParallelConfig,
    TorchFullyShardedDataParallelConfig,
    finalize_model_grads,
    wrap_model,
)
from core.models.gpt import GPTModel
from core.models.gpt.hugging_face import save_hugging_face
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.transformer.lora import add_lora, freeze_parameters
from core.transformer.transformer_config import TransformerConfig
from tests.unit._gpt import gpt_of

CONFIGS: dict[str, Any] = {
    "ddp": lambda **f: DistributedDataParallelConfig(**f),
    "zero1": lambda **f: DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, **f
    ),
    "zero2": lambda **f: DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads", **f),
    "zero3": lambda **f: FullyShardedDataParallelConfig(**f),
    "fsdp2": lambda **f: TorchFullyShardedDataParallelConfig(**f),
}
VOCABULARY, LENGTH, BUCKET = 48, 8, 3000  # bytes, less than the largest tensor
SOME = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 20, "init_method_std": 0.3}
MODERN = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": "silu", "add_bias_linear": False}


def gpt(
    *,
    tied: bool = True,
    lora: bool = False,
    frozen: bool = False,
    seed: int = 3,
    vp_stage: int | None = None,
    **fields: Any,
) -> GPTModel:
    torch.manual_seed(seed)
    config = TransformerConfig(
        **{**SOME, **MODERN, "num_query_groups": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0, **fields}
    )
    model = gpt_of(config, tied, VOCABULARY, LENGTH, vp_stage=vp_stage)
    if lora:
        add_lora(model, 3, 6.0)
        for name, parameter in model.named_parameters():
            if "linear_out" in name:  # starts at zero, which would hide the update
                fill(parameter, len(name))
    if frozen:
        freeze_parameters(model, ["embedding.*", "decoder.layers.0.mlp.*"])
    return model


def fill(parameter: nn.Parameter, seed: int) -> None:
    with torch.no_grad():
        parameter.normal_(generator=torch.Generator().manual_seed(seed))


def wrapped(kind: str, model: GPTModel, *, instances: int = 1, group: Any = None) -> nn.Module:
    fields = {"num_distributed_optimizer_instances": instances} if instances > 1 else {}
    return wrap_model(model, model.config, CONFIGS[kind](**fields), process_group=group)


def train(model: nn.Module, optimizer: Any, seed: int) -> None:
    """Takes a step with the same tokens on every rank."""
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    model.zero_grad_buffer()
    model(tokens[:, :-1], labels=tokens[:, 1:]).mean().backward()
    finalize_model_grads([model])
    optimizer.step()


def optimizer_of(model: nn.Module, lr: float = 0.05) -> Any:
    return get_megatron_optimizer(OptimizerConfig(lr=lr, weight_decay=0.0), [model])


def start(tp: int = 1, instances: int = 1, ep: int = 1, pp: int = 1, vpp: int | None = None) -> None:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tp, pp, vpp, expert_model_parallel_size=ep, num_distributed_optimizer_instances=instances
    )


def exported(model: nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """Returns what `save_hugging_face` writes; every rank calls it."""
    from safetensors.torch import load_file

    save_hugging_face(model, folder)
    dist.barrier()
    return load_file(folder / "model.safetensors")
