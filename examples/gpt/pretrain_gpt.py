"""Trains a GPT. Without --data-path it trains on the source code of this Python's standard library.

Run it by `shardstack train`, under `python -m shardstack.training.launch --nproc-per-node 2`, `torchrun` or Slurm, or
alone for one rank. Flags have Megatron-LM's names; README.md shows commands.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from bigram import bigram_validation_loss
from pretrained import continue_megatron, load_pretrained
from run_data import find_corpus, find_tokenizer
from run_folder import begin_or_continue, check_output_folders, run_folder_held, run_folder_named, say
from sampling import SamplingConfig, generate_tokens, stream_text

from shardstack import parallel_state
from shardstack.base import device
from shardstack.base.device import current_device
from shardstack.base.errors import ConfigError
from shardstack.base.module_protocol import unwrap_model
from shardstack.distributed import wrap_model
from shardstack.models.gpt.megatron_layout import find_megatron
from shardstack.optimizer import get_megatron_optimizer
from shardstack.tokenizers import Tokenizer
from shardstack.training.checkpointing import load_checkpoint
from shardstack.training.config import PretrainConfig, sequence_multiple, validate
from shardstack.training.config.arguments import parse_arguments
from shardstack.training.data import RunData, load_data
from shardstack.training.launch.entry import environment_restart_count, run_command
from shardstack.training.launch.generations import generations
from shardstack.training.loop import Outcome, train
from shardstack.training.recovery import load_newest_copy
from shardstack.training.state import TrainingState, build_gpt, build_scheduler, initialize, wrapper_config
from shardstack.transformer.lora import add_lora, freeze_parameters
from shardstack.transformer.module import Float16Module
from shardstack.transformer.moe.moe_layer import STATISTICS, MoELayer

DEFAULTS = {
    # a model that two CPU cores train in minutes; flags change any of these
    "num_layers": 4,
    "hidden_size": 192,
    "num_attention_heads": 6,
    "ffn_hidden_size": 512,
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "seq_length": 128,
    "micro_batch_size": 8,
    "num_workers": 0,
    "train_iters": 750,
    "lr": 1.5e-3,
    "min_lr": 1e-4,
    "lr_decay_style": "cosine",
    "lr_warmup_fraction": 0.05,
    "adam_beta2": 0.95,
    "weight_decay": 0.1,
    "eval_interval": 250,
    "eval_iters": 20,
    "save_interval": 250,
    "log_interval": 10,
}
PROMPT = "def "


def main(arguments: Sequence[str]) -> None:
    config = parse_arguments(arguments, DEFAULTS, description=__doc__, name="pretrain_gpt.py")
    for generation in generations(partial(validate, config)):  # one, unless the launcher keeps survivors of lost ranks
        with generation:
            run(config)


def run(config: PretrainConfig) -> None:
    initialize(config)
    with run_folder_named(config) as config:
        check_output_folders(config)
        with run_folder_held(config.checkpoint.save):
            pretrain(begin_or_continue(config))


def pretrain(config: PretrainConfig) -> None:
    data = load_data(config, find_corpus(config.data), dist.get_world_size(), find_tokenizer(config.data))
    say(describe_model(config, data.vocab_size))
    check_model_fits(config, data.vocab_size)

    virtual = config.model.virtual_pipeline_model_parallel_size
    stages = [
        build_model(config, data.vocab_size, vp_stage) for vp_stage in ([None] if virtual is None else range(virtual))
    ]
    freeze_parameters(stages, config.gpt.freeze)
    model, *later_stages = (wrap_model(stage, config.model, wrapper_config(config)) for stage in stages)
    optimizer = get_megatron_optimizer(config.optimizer, [model, *later_stages])
    scheduler = build_scheduler(config, optimizer)
    state = TrainingState(
        model=model,
        later_stages=later_stages,
        optimizer=optimizer,
        scheduler=scheduler,
        vocab_size=data.vocab_size,
        sample_order=data.sample_order,
    )
    verify = config.checkpoint.verify_checkpoint
    if load_newest_copy(state, config) is not None:
        say(f"continuing from iteration {state.iteration} in memory")
    elif config.checkpoint.load is not None and find_megatron(config.checkpoint.load) is not None:
        say(continue_megatron(state, config, config.checkpoint.load))
    elif config.checkpoint.load is not None:
        say(load_checkpoint(state, config, config.checkpoint.load, fall_back=environment_restart_count() > 0))
    elif config.checkpoint.pretrained_checkpoint is not None:
        folder, given = config.checkpoint.pretrained_checkpoint, config.checkpoint
        upcycle = given.moe_upcycling_granularity if given.moe_use_upcycling else 0
        say(load_pretrained(state, folder, verify=verify, upcycle=upcycle))

    outcome = train(state, config, data)
    report(outcome, state, config, data)


def build_model(config: PretrainConfig, vocab_size: int, vp_stage: int | None = None) -> torch.nn.Module:
    """Builds the model, in the precision that its wrapper needs: one that shards parameters keeps fp32, and casts.

    Of pipeline stages this rank's, or with virtual stages the one of that number.
    """
    is_cut = config.ddp.shards_parameters
    is_first_replica = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    on_meta = is_cut or not is_first_replica
    # On the meta device nothing is allocated or drawn: a wrapper that cuts parameters fills each rank's shards, and
    # others broadcast the tensors of the first replica.
    with torch.device("meta") if on_meta else nullcontext():
        model: torch.nn.Module = build_gpt(config, vocab_size, vp_stage)
    add_lora(model, config.gpt.lora_rank, config.gpt.lora_alpha, config.gpt.lora_targets)
    if is_cut:
        return model
    if config.model.fp16 or config.model.bf16:
        model = Float16Module(config.model, model)  # on the host: a GPU never holds the whole model in fp32
    return model if on_meta else model.to(current_device())


def describe_model(config: PretrainConfig, vocab_size: int) -> str:
    """Returns a line that says what the model computes, and how its weights start."""
    model, gpt = config.model, config.gpt
    function = model.activation_func if isinstance(model.activation_func, str) else "its own activation"
    activation = "SwiGLU" if model.gated_linear_unit and function == "silu" else function
    heads = "tied" if not gpt.untie_embeddings_and_output_weights else "untied"
    parts = [
        model.normalization,
        activation,
        f"{'rotary' if gpt.position_embedding_type == 'rope' else 'learned'} positions",
        "biases" if model.add_bias_linear else "no biases",
        f"dropout {model.hidden_dropout:g} (attention {model.attention_dropout:g})",
        f"initial std {model.init_method_std:g}",
        f"{vocab_size} {heads} embeddings",
    ]
    return f"model: {', '.join(parts)}"


def check_model_fits(config: PretrainConfig, vocab_size: int) -> None:
    """Refuses a model whose weights alone exceed the memory of this rank, before it is built.

    Raises:
        ConfigError: names both sizes.
    """
    model = config.model
    attention = 2 * model.hidden_size * (model.kv_channels or 1) * model.num_attention_heads
    widths = (model.num_layers - model.num_expert_layers) * (model.ffn_hidden_size or 1)
    of_experts = (model.num_moe_experts or 0) * model.expert_ffn_size + (
        model.moe_shared_expert_intermediate_size or 0
    )
    widths += model.num_expert_layers * of_experts
    mlps = model.hidden_size * widths * (3 if model.gated_linear_unit else 2)
    parameters = vocab_size * model.hidden_size + model.num_layers * attention + mlps
    of_model = model.tensor_model_parallel_size * model.pipeline_model_parallel_size
    pieces = dist.get_world_size() if config.ddp.shards_parameters else of_model
    needed, there = 4 * parameters // pieces, device.memory_bytes()
    if needed > there:
        raise ConfigError(
            f"num_layers {model.num_layers}, hidden_size {model.hidden_size} and a vocabulary of {vocab_size} make "
            f"{parameters / 1e9:.3g} billion parameters: {needed / 2**30:.3g} GiB of weights on each rank, which has "
            f"{there / 2**30:.3g} GiB; make the model smaller, or shard it over more ranks"
        )


def report(outcome: Outcome, state: TrainingState, config: PretrainConfig, data: RunData) -> None:
    """Prints how the run ended, how good the model is, and where all files are."""
    folder = config.checkpoint.folder
    if outcome.stopped_by:
        say(f"stopped by {outcome.stopped_by} after iteration {outcome.iteration}; saved {outcome.checkpoint}")
        say(f"to continue, repeat the command with --load {folder}")
        return
    if outcome.checkpoint is None:
        say(f"{folder} is at iteration {outcome.iteration} already; raise --train-iters above it to go on")
        return
    has_stages = config.model.pipeline_model_parallel_size > 1  # sampling runs the model of one stage
    if outcome.validation_loss is None or data.valid is None or data.tokenizer is None or has_stages:
        say(f"finished at iteration {outcome.iteration}; saved {outcome.checkpoint}")
        return
    text = "".join(sample(state, config, data.tokenizer))  # every rank takes part
    if dist.get_rank() != 0:
        return
    num_samples = config.run.eval_iters * config.global_batch_size(dist.get_world_size())
    bigram = bigram_validation_loss(data.train, data.valid, num_samples, data.tokenizer.vocab_size)
    change = 100 * (outcome.validation_loss / bigram - 1)
    say(f"\nthe model wrote: {PROMPT}{text}\n")
    say(f"validation loss        {outcome.validation_loss:.4f} nats a token")
    say(f"add-one bigram model   {bigram:.4f} on the same tokens (the model: {change:+.1f} %)")
    for line in tokens_of_experts(state, config):
        say(line)
    say(f"checkpoint             {outcome.checkpoint}")
    say(f"loss curve, log        {folder}/loss.png, {folder}/log.jsonl")
    generate = [short(sys.executable), "-m", "shardstack", "generate", "--load", str(folder), "--prompt", PROMPT]
    say(f"more text              {shlex.join(generate)}")


def tokens_of_experts(state: TrainingState, config: PretrainConfig) -> Iterator[str]:
    """Yields a line for each layer with experts: how many tokens each of them had in the last step."""
    tokens = config.global_batch_size(dist.get_world_size()) * config.data.seq_length * config.model.moe_router_topk
    for layer in unwrap_model(state.model).modules():
        if isinstance(layer, MoELayer) and layer.step_statistics is not None:
            loads = layer.step_statistics[len(STATISTICS) :]  # 1 is the mean
            counts = (loads * tokens / len(loads)).round().long().tolist()
            yield f"tokens of experts      {' '.join(map(str, counts))} in layer {layer.layer_number}"


def sample(state: TrainingState, config: PretrainConfig, tokenizer: Tokenizer, num_tokens: int = 80) -> Iterator[str]:
    """Yields a few lines of text that the model writes."""
    layout = config.model
    unwrap_model(state.model).parallel_output = False  # type: ignore[assignment]  # whole logits on every rank
    tokens = generate_tokens(
        state.model,
        tokenizer.encode(PROMPT).tolist(),
        num_tokens,
        SamplingConfig(temperature=0.7, top_p=0.9),
        vocab_size=tokenizer.vocab_size,
        max_sequence_length=config.max_sequence_length,
        end=tokenizer.eod,
        length_multiple=sequence_multiple(
            layout.tensor_model_parallel_size, layout.context_parallel_size, layout.sequence_parallel
        ),
    )
    return stream_text(tokenizer, tokens)


def short(path: str) -> str:
    """Returns a path relative to the current folder, if that is shorter."""
    return min(path, os.path.relpath(path), key=len)


if __name__ == "__main__":
    run_command(main)
