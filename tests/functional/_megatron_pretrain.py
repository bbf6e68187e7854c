"""A minimal pretraining script for Megatron-LM. Tests run it with its imports changed.

torchrun --nproc-per-node 2 pretrain.py [--use-torch-fsdp2 | --use-distributed-optimizer] [--bf16]

`test_megatron_core_script.py` runs it unchanged on megatron-core, with the adapter and without.
"""

import argparse
import inspect
import os
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    finalize_model_grads,
)
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.num_microbatches_calculator import get_num_microbatches, init_num_microbatches_calculator
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config, unwrap_model

SEQUENCE, VOCABULARY, GLOBAL_BATCH, MICRO_BATCH, STEPS = 16, 64, 8, 2, 5


def initialize_megatron():
    torch.distributed.init_process_group(
        backend="nccl" if torch.cuda.is_available() else "gloo",
        world_size=int(os.environ["WORLD_SIZE"]),
        rank=int(os.environ["RANK"]),
    )
    parallel_state.initialize_model_parallel(1, 1, None, context_parallel_size=1, create_gloo_process_groups=True)
    torch.manual_seed(1234)
    model_parallel_cuda_manual_seed(1234)
    data_parallel = parallel_state.get_data_parallel_world_size()
    grows = "rampup_batch_size" in inspect.signature(init_num_microbatches_calculator).parameters  # up to 0.16
    init_num_microbatches_calculator(
        rank=torch.distributed.get_rank(),
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size=MICRO_BATCH,
        data_parallel_size=data_parallel,
        **({"rampup_batch_size": None} if grows else {}),
    )


def model_provider(config, pre_process=True, post_process=True):
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCABULARY,
        SEQUENCE,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
    )


def get_model(args, config):
    model = [model_provider(config, parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage())]
    for module in model:
        module.model_type = ModelType.encoder_or_decoder
    if config.bf16 and not args.use_torch_fsdp2:
        model = [Float16Module(config, module) for module in model]
    DP = TorchFullyShardedDataParallel if args.use_torch_fsdp2 else DistributedDataParallel
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=not args.use_torch_fsdp2,
        use_distributed_optimizer=args.use_distributed_optimizer,
        data_parallel_sharding_strategy=args.data_parallel_sharding_strategy,
        check_for_nan_in_grad=True,
    )
    model = [
        DP(config=config, ddp_config=ddp_config, module=module, disable_bucketing=index > 0)
        for index, module in enumerate(model)
    ]
    for module in model:
        module.broadcast_params()
    return model


def batches():
    """Yields this rank's samples of each global batch."""
    generator = torch.Generator().manual_seed(7)
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    while True:
        tokens = torch.randint(0, VOCABULARY, (GLOBAL_BATCH, SEQUENCE + 1), generator=generator)
        for start in range(rank * MICRO_BATCH, GLOBAL_BATCH, size * MICRO_BATCH):
            text = tokens[start : start + MICRO_BATCH]
            yield text[:, :-1], text[:, 1:], torch.ones(MICRO_BATCH, SEQUENCE)


def loss_func(loss_mask, output_tensor):
    losses = output_tensor.float().view(-1)
    loss_mask = loss_mask.view(-1).float()
    loss = torch.sum(losses * loss_mask)
    num_tokens = loss_mask.sum().detach().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.float()])}


def forward_step(data_iterator, model):
    tokens, labels, loss_mask = next(data_iterator)
    position_ids = torch.arange(SEQUENCE).unsqueeze(0).expand_as(tokens)
    output_tensor = model(tokens, position_ids, None, labels=labels, loss_mask=loss_mask)
    return output_tensor, partial(loss_func, loss_mask)


def train_step(data_iterator, model, optimizer, scheduler):
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=get_num_microbatches(),
        seq_length=SEQUENCE,
        micro_batch_size=MICRO_BATCH,
        decoder_seq_length=SEQUENCE,
        forward_only=False,
    )
    update_successful, grad_norm, _ = optimizer.step()  # the third is the number of zeros in the gradient
    if update_successful:
        scheduler.step(increment=GLOBAL_BATCH)
    total = torch.stack([report["lm loss"] for report in reports]).sum(0)
    torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return (total[0] / total[1]).item(), float(grad_norm)


def main():
    parser = argparse.ArgumentParser()
    for flag in ("--use-torch-fsdp2", "--use-distributed-optimizer", "--bf16", "--calculate-per-token-loss"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--data-parallel-sharding-strategy", default="no_shard")
    args = parser.parse_args()
    initialize_megatron()
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bf16=args.bf16,
        pipeline_dtype=torch.float32,
        calculate_per_token_loss=args.calculate_per_token_loss,
    )
    model = get_model(args, config)
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        min_lr=1e-3,
        bf16=args.bf16,
        use_distributed_optimizer=args.use_distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(optimizer_config, model)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-2,
        min_lr=1e-3,
        lr_warmup_steps=GLOBAL_BATCH,
        lr_decay_steps=GLOBAL_BATCH * STEPS,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=GLOBAL_BATCH * STEPS,
        wd_incr_style="constant",
    )
    config = get_model_config(model[0])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if not args.use_torch_fsdp2:
        config.no_sync_func = model[0].no_sync
    if torch.distributed.get_rank() == 0:
        print(f"built: {type(model[0]).__module__}.{type(model[0]).__name__}", flush=True)
    data_iterator = batches()
    for iteration in range(STEPS):
        loss, grad_norm = train_step(data_iterator, model, optimizer, scheduler)
        if torch.distributed.get_rank() == 0:
            print(f"iteration {iteration} | lm loss: {loss:.9e} | grad norm: {grad_norm:.9e}", flush=True)
    assert len(list(unwrap_model(model)[0].parameters())) > 0
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
