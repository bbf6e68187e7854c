"""Trains a small GPT of megatron-core by its own schedule, `finalize_model_grads` and optimizer, on the CPU."""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from core.distributed import FullyShardedDataParallel
from tests.unit.distributed._toys import full

STEPS, MICRO_BATCHES, VOCAB, SEQUENCE, SAMPLES = 4, 3, 32, 8, 2
CLIP, LR = 0.5, 1e-2


class _CudaIsCpu(TorchFunctionMode):
    """Makes on the CPU what megatron-core asks of CUDA by name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        found = func(*args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if func is torch.Tensor.type and len(args) == 1 else found


@contextmanager
def cuda_is_cpu() -> Iterator[None]:
    """Patches the names of CUDA that megatron-core needs to build, train and clip a GPT, for the CPU."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.tensor_parallel import random as streams
    from megatron.core.transformer.moe import moe_utils

    with ExitStack() as stack:
        # Else a process is spawned for a queue that this process alone reads and writes, and outlives it.
        stack.enter_context(mock.patch.object(filesystem_async, "_results_queue", queue.Queue()))
        # 0.16 reads a name of Transformer Engine that it has not imported.
        stack.enter_context(mock.patch.object(moe_utils, "te_general_gemm", None, create=True))
        for owner, name, stand_in in (
            (torch.cuda, "current_device", lambda: "cpu"),
            (torch.cuda, "current_stream", lambda *args: mock.MagicMock()),
            (torch.cuda, "get_rng_state", torch.get_rng_state),
            (torch.cuda, "manual_seed", lambda seed: None),
            (torch.cuda, "synchronize", lambda *args: None),
            (torch.cuda, "nvtx", mock.MagicMock()),
            (streams, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state()),
            (streams, "_set_cuda_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state)),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        stack.enter_context(_CudaIsCpu())
        yield


@contextmanager
def groups(pipeline: int = 1, tensor: int = 1, expert: int = 1) -> Iterator[None]:
    """Makes process groups of megatron-core over all ranks, and its random streams."""
    from megatron.core import parallel_state, tensor_parallel

    with cuda_is_cpu():
        parallel_state.initialize_model_parallel(tensor, pipeline, expert_model_parallel_size=expert)
        tensor_parallel.model_parallel_cuda_manual_seed(1234)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


def build(tied: bool = False, *, pre_process: bool = True, post_process: bool = True, **fields: Any) -> nn.Module:
    """Builds a GPT of two layers, with the same weights on every rank."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(7)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        transformer_impl="local",
        **fields,
    )
    if "moe_layer_freq" in fields:  # layers differ
        spec: Any = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    else:
        spec = get_gpt_layer_local_spec(fields.get("num_moe_experts"), qk_layernorm=fields.get("qk_layernorm", False))
    model = GPTModel(
        config,
        spec,
        VOCAB,
        SEQUENCE,
        parallel_output=True,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="learned_absolute",
    )
    return Float16Module(config, model) if config.bf16 or config.fp16 else model


def build_stage(tied: bool = False) -> nn.Module:
    """Builds this rank's stage of two pipeline stages, with weights of `build`."""
    from megatron.core import parallel_state

    whole = dict(build(tied).named_parameters())
    is_first = parallel_state.is_pipeline_first_stage()
    fields = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32, "batch_p2p_sync": False}
    model = build(tied, pre_process=is_first, post_process=not is_first, **fields)
    shared = "embedding.word_embeddings.weight"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(whole[shared if tied and name == "output_layer.weight" else name_in_model(name)])
    return model


def name_in_model(name: str) -> str:
    """Returns the name in the whole model of this rank's stage's parameter."""
    from megatron.core import parallel_state

    return name.replace("decoder.layers.0.", f"decoder.layers.{parallel_state.get_pipeline_model_parallel_rank()}.")


def wrap(kind: type[nn.Module], model: nn.Module, settings: Any = None) -> nn.Module:
    """Wraps a model as Megatron-LM's ``get_model`` does."""
    from megatron.core.distributed import TorchFullyShardedDataParallelConfig

    settings = settings or TorchFullyShardedDataParallelConfig(reshard_after_forward=True)
    return kind(config=model.config, ddp_config=settings, module=model, disable_bucketing=False)


def tokens(step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randint(0, VOCAB, (SAMPLES, SEQUENCE), generator=generator)


def _loss(per_token: bool, text: torch.Tensor, output: torch.Tensor) -> tuple[Any, ...]:
    if not per_token:
        return output.float().mean(), {"loss": output.detach().float().mean()}
    count = (text < VOCAB // 2 + dist.get_rank() * 4).float()  # another number of tokens on each rank
    total = (output.float() * count).sum()
    return total, count.sum().int(), {"loss": total.detach()}


def _forward_step(data: Iterator[torch.Tensor], model: nn.Module, per_token: bool = False) -> Any:
    text = next(data)
    output = model(text, torch.arange(SEQUENCE).expand_as(text), None, labels=text.roll(-1, 1))
    return output, partial(_loss, per_token, text)


def build_optimizer(model: nn.Module, **fields: Any) -> Any:
    """Builds an optimizer as Megatron-LM's loop does."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    fields = {"optimizer": "adam", "lr": LR, "min_lr": LR, "weight_decay": 0.0, "clip_grad": CLIP} | fields
    return get_megatron_optimizer(OptimizerConfig(**fields), [model])


def train(
    model: nn.Module,
    steps: int = STEPS,
    each_step: Callable[[Any], None] = lambda optimizer: None,
    *,
    first: int = 0,
    continued: Any = None,
    **fields: Any,
) -> tuple[list[float], list[float | None], Any]:
    """Trains as Megatron-LM's `train_step`, from step `first` on, with the optimizer `continued` or a new one.

    Returns this rank's losses, each step's norm (None: skipped), and the optimizer. All pipeline stages read the same
    tokens.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_model_config

    config, replica = get_model_config(model), parallel_state.get_data_parallel_rank()
    optimizer = build_optimizer(model, **fields) if continued is None else continued
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    losses, norms = [], []
    for step in range(first, first + steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=partial(_forward_step, per_token=config.calculate_per_token_loss),
            data_iterator=iter([tokens(step, micro, replica) for micro in range(MICRO_BATCHES)]),
            model=[model],
            num_microbatches=MICRO_BATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=SAMPLES,
            forward_only=False,
        )
        each_step(optimizer)
        _, norm, _ = optimizer.step()
        losses += [report["loss"].item() for report in reports]
        norms.append(norm)
    return losses, norms, optimizer


def serial(ranks: int, tied: bool = False, per_token: bool = False) -> tuple[list[list[float]], list[float], Any]:
    """Trains in one process what all ranks do: a plain model, a plain optimizer, a plain sum of losses."""
    model = build(tied)
    optimizer = torch.optim.AdamW(model.parameters(), LR, eps=1e-8, betas=(0.9, 0.999), weight_decay=0.0)
    losses: list[list[float]] = [[] for _ in range(ranks)]
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        counts = 0.0
        for rank in range(ranks):
            for micro in range(MICRO_BATCHES):
                text = tokens(step, micro, rank)
                output = model(text, torch.arange(SEQUENCE).expand_as(text), None, labels=text.roll(-1, 1)).float()
                count = (text < VOCAB // 2 + rank * 4).float()
                loss = (output * count).sum() if per_token else output.mean()
                (loss if per_token else loss / (MICRO_BATCHES * ranks)).backward()
                losses[rank].append(loss.item())
                counts += count.sum().item()
        if per_token:
            for parameter in model.parameters():
                parameter.grad.div_(counts)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
    return losses, norms, {name: p.detach().clone() for name, p in model.named_parameters()}


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns whole weights, of this rank's stage and tensor-parallel part, by their names in the plain model."""
    if isinstance(model, FullyShardedDataParallel):
        with model.whole_parameters():
            return {name.replace("module.", ""): p.detach().clone() for name, p in model.named_parameters()}
    return {name.replace("module.", ""): full(parameter) for name, parameter in model.named_parameters()}


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts the reduce-scatters and all-gathers of FSDP2, wrapped inside, by torch's own collectives."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as inside

    calls: Counter[str] = Counter()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        stack.enter_context(mock.patch("core.comm.gloo.exchanges_directly", lambda *_: False))
        for name in ("foreach_all_gather", "foreach_reduce"):
            counting_one = counting(name, getattr(inside, name))
            for module in (inside, __import__(inside.__name__.replace("collectives", "param_group"), fromlist=["x"])):
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, counting_one))
        yield calls


def stock(name: str) -> type:
    """Returns Megatron-LM's class in whose place the adapter puts its class of this name."""
    from core.adapters.megatron_lm import registration

    return next(stock for stock, own in registration.REPLACED.items() if getattr(own, "__name__", "") == name)


def raises_one_line(error: type[Exception], match: str, *args: Any, **kwargs: Any) -> None:
    """Calls the first of `args` with the others, which raises an error of one line."""
    with pytest.raises(error, match=match) as raised:
        args[0](*args[1:], **kwargs)
    assert "\n" not in str(raised.value)
