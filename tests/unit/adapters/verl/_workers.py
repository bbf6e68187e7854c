"""verl's own `TrainingWorker` over a tiny model on gloo ranks, driven without Ray, and the same steps by a plain loop.

Stubs: `_Cpu`, because verl has no platform for a CPU; and for critics the attention that verl asks for by name,
``flash_attention_2``, which is built for GPUs alone. All else is verl as released.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.unit.distributed._hugging_face import VOCAB, hugging_face_model

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params", "fsdp2")
SEQUENCES = 6
CLIP = 0.5
LR = 0.05


def _use_cpu() -> None:
    """Lets verl run on a CPU, by its own way to add a platform. Once a process, before anything else of verl."""
    from verl.plugin.platform import platform_manager
    from verl.plugin.platform.platform_base import PlatformBase

    if platform_manager._current_platform is not None:
        return
    names = {name: (lambda self, *args, **kwargs: None) for name in PlatformBase.__abstractmethods__}
    sizes = ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved")
    module = SimpleNamespace(**dict.fromkeys(sizes, lambda *args: 0))
    module.mem_get_info, module.get_device_name, module.empty_cache = lambda: (0, 0), lambda: "CPU", lambda: None
    names |= {
        "device_name": "cpu", "vendor_name": "cpu", "device_module": module, "is_available": lambda self: True,
        "current_device": lambda self: "cpu", "communication_backend_name": lambda self: "gloo",
        "visible_devices_envvar": lambda self: "CUDA_VISIBLE_DEVICES",
    }  # fmt: skip
    platform_manager.set_platform(type("_Cpu", (PlatformBase,), names)())


def save_model(folder: Path, kind: str = "qwen3", tied: bool = True, head: str = "CausalLM", **fields: Any) -> str:
    """Writes a tiny random model and a tokenizer, as verl reads them. One process calls it."""
    import tokenizers
    import transformers

    model = hugging_face_model(kind, tied, **fields)
    if head != "CausalLM":
        model.config.num_labels = 1
        model = getattr(transformers, type(model).__name__.replace("CausalLM", head))(model.config)
    model.save_pretrained(folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="2"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="0", eos_token="1", pad_token="0", unk_token="2"
    )
    tokenizer.save_pretrained(folder)
    return str(folder)


def fp32() -> dict[str, str]:
    return {"param_dtype": "fp32", "reduce_dtype": "fp32"}


@contextmanager
def verl_environment(local: int | None = None) -> Any:
    """The variables that Ray's worker group sets. verl finds no TRL, of which it would ask for a class of before 1.0.

    Args:
        local: ranks of a machine; all by default.
    """
    world = os.environ["WORLD_SIZE"]
    values = {"LOCAL_RANK": os.environ["RANK"], "LOCAL_WORLD_SIZE": str(local or world), "MASTER_PORT": "1"}
    _use_cpu()
    from verl.models.transformers import monkey_patch

    no_trl = mock.patch.object(monkey_patch, "is_trl_available", lambda: False)
    with no_trl, mock.patch.dict(os.environ, values | {"MASTER_ADDR": "localhost"}):
        yield


def engine_config(sharding: str, **fields: Any) -> Any:
    _use_cpu()
    from core.adapters.verl import ShardstackEngineConfig

    given = {
        "mixed_precision": fp32(), "use_torch_compile": False, "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 1, "infer_micro_batch_size_per_gpu": 1,
    }  # fmt: skip
    return ShardstackEngineConfig(sharding_strategy=sharding, **given | fields)


def worker_of(
    path: str,
    strategy: str,
    *,
    model_type: str = "language_model",
    loss: Any = None,
    model: dict[str, Any] | None = None,
    optim: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
    **fields: Any,
) -> Any:
    """Builds a worker, by default with SFT's loss."""
    config = engine_config(strategy, **fields)
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import sft_loss

    forward_only = fields.get("forward_only", False)
    given = {"override_config": {"attn_implementation": "eager"}, "enable_gradient_checkpointing": False}
    optimizer = {"lr": LR, "clip_grad": CLIP, "total_training_steps": 10, "override_optimizer_config": {"eps": 1e-3}}
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type=model_type,
            model_config=HFModelConfig(path=path, external_lib="core.adapters.verl", **given | (model or {})),
            engine_config=config,
            optimizer_config=None if forward_only else FSDPOptimizerConfig(**optimizer | (optim or {})),
            checkpoint_config=CheckpointConfig(**(checkpoint or {})),
        )
    )
    with ExitStack() as stack:
        if model_type == "value_model":
            stack.enter_context(_without_flash_attention())
        worker.reset()
    worker.set_loss_fn(loss or partial(sft_loss, config=None))
    return worker


@contextmanager
def stub_of_flash_attention() -> Any:
    """Lets transformers take ``flash_attention_2``, and computes it as plain attention over packed sequences."""
    import transformers
    from transformers.integrations import flash_attention
    from verl.models.transformers import monkey_patch

    def attention(
        q: Tensor, k: Tensor, v: Tensor, mask: Any, length: int, *, position_ids: Tensor, **kw: Any
    ) -> Tensor:
        of_sequence = (position_ids == 0).cumsum(-1)[0]
        allowed = (of_sequence[:, None] == of_sequence).tril()
        heads = [states.transpose(1, 2) for states in (q, k, v)]
        return nn.functional.scaled_dot_product_attention(
            *heads, attn_mask=allowed, scale=kw["softmax_scale"], enable_gqa=True
        ).transpose(1, 2)

    with (
        mock.patch.object(flash_attention, "_flash_attention_forward", None),  # which verl replaces
        mock.patch.object(monkey_patch, "_flash_attention_forward", attention),
        mock.patch.object(
            transformers.PreTrainedModel, "_check_and_adjust_attn_implementation", lambda self, name, *args, **kw: name
        ),
    ):
        yield


@contextmanager
def _without_flash_attention() -> Any:
    import transformers

    build = transformers.AutoModelForTokenClassification.from_pretrained

    def eager(*args: Any, **kwargs: Any) -> Any:
        return build(*args, **kwargs | {"attn_implementation": "eager"})

    with mock.patch.object(transformers.AutoModelForTokenClassification, "from_pretrained", eager):
        yield


def sequences(step: int) -> list[dict[str, Tensor]]:
    """Makes the sequences of a global batch: a prompt and a response, 3 to 11 tokens, and what PPO knows of them."""
    generator = torch.Generator().manual_seed(100 + step)
    found = []
    for index in range(SEQUENCES):
        prompt, response = 1 + (index + step) % 3, 2 + (5 * index + step) % 7
        tokens = torch.randint(2, VOCAB, (prompt + response,), generator=generator)
        found.append(
            {
                "input_ids": tokens,
                "position_ids": torch.arange(prompt + response),
                "loss_mask": torch.tensor([0.0] * prompt + [1.0] * response),
                "prompts": tokens[:prompt],
                "responses": tokens[prompt:],
                "response_mask": torch.ones(response, dtype=torch.long),
                "old_log_probs": -2.0 - torch.rand(response, generator=generator),
                "advantages": torch.randn(response, generator=generator),
                "values": torch.randn(response, generator=generator),
                "returns": torch.randn(response, generator=generator),
            }
        )
    return found


def batch(step: int, rank: int | None = None, world: int | None = None, **fields: Any) -> Any:
    """Returns a rank's share of a global batch, packed as verl packs it. By default this rank's."""
    from verl.utils import tensordict_utils as tu

    rank, world = dist.get_rank() if rank is None else rank, world or dist.get_world_size()
    own = sequences(step)[rank * SEQUENCES // world : (rank + 1) * SEQUENCES // world]
    packed = {key: torch.nested.as_nested_tensor([s[key] for s in own], layout=torch.jagged) for key in own[0]}
    lengths = [len(sequence["input_ids"]) for sequence in own]
    others = {"temperature": 1.0, "global_batch_size": SEQUENCES, "update_lr_scheduler": True}
    return tu.get_tensordict(packed, others | {"global_token_num": lengths} | fields)


def policy_loss(**fields: Any) -> Any:
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    given = {"strategy": "fsdp", "ppo_mini_batch_size": 1, "ppo_micro_batch_size_per_gpu": 1, "rollout_n": 1}
    return partial(ppo_loss, config=FSDPActorConfig(**given | fields))


def train(worker: Any, steps: Iterable[int], **fields: Any) -> list[tuple[float, float]]:
    """Returns loss and norm of each step. Of a policy all metrics come from every micro-batch."""
    found = []
    for step in steps:
        metrics = worker.train_batch(batch(step, **fields))["metrics"]
        found.append((metrics["loss"], metrics["grad_norm"]))
    return found


def weights(worker: Any) -> dict[str, Tensor]:
    from core.adapters.bridge.checkpoints import whole_state_dict

    return whole_state_dict(worker.engine.module)


def reference(path: str, steps: range, loss: Any = None) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Trains a plain model, one sequence after the other and without packing, by verl's loss and torch's AdamW."""
    _use_cpu()
    import transformers
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.losses import sft_loss

    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01, betas=(0.9, 0.999), eps=1e-3)
    found = []
    for step in steps:
        total, data = 0.0, sequences(step)
        tokens = sum(int(sequence["loss_mask"].sum()) for sequence in data)
        for sequence in data:
            logits = model(input_ids=sequence["input_ids"][None]).logits[0].log_softmax(-1)
            log_probs = logits.gather(1, sequence["input_ids"].roll(-1)[:, None])[:, 0]
            one = {key: torch.nested.as_nested_tensor([value], layout=torch.jagged) for key, value in sequence.items()}
            of_batch = {"dp_size": 1, "batch_num_tokens": tokens, "global_batch_size": SEQUENCES}
            output = {"log_probs": torch.nested.nested_tensor_from_jagged(log_probs, one["input_ids"].offsets())}
            part, _ = (loss or partial(sft_loss, config=None))(
                model_output=output, data=tu.get_tensordict(one, of_batch)
            )
            part.backward()
            total += part.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        found.append((total, norm.item()))
    return found, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
