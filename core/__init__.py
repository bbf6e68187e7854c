"""shardstack: data parallelism for large transformer stacks, from replicated to fully sharded by one class swap.

Nothing is imported here until it is used. Take what you need from the sub-packages (``core.distributed``,
``core.models.gpt``, ``core.optimizer``, ``core.parallel_state``), each of which needs torch and numpy alone.
"""

from .absent_names import absent_names

__version__ = "0.1.0"

__getattr__ = absent_names(
    __name__,
    {
        "inference": "models here train; export weights with examples/gpt/convert.py, and serve these",
        "inference_params": "models here train, and keep no keys and values",
        "fusions": "torch's own kernels and torch.compile fuse; layers call them",
        "extensions": "Transformer Engine is not used; layer specs are get_gpt_layer_local_spec",
        "fp8_utils": "parameters are fp32, fp16 or bf16",
        "fp4_utils": "parameters are fp32, fp16 or bf16",
        "quantization": "parameters are fp32, fp16 or bf16",
        "post_training": "models here are trained, not distilled or quantised",
        "export": "use core.models.gpt.hugging_face, which writes Hugging Face checkpoints",
        "resharding": "core.dist_checkpointing loads a checkpoint under any layout",
        "ssm": "models here are transformers; core.models.gpt",
        "packed_seq_params": "give the model's forward document_starts",
        "jit": "use torch.compile",
        "timers": "core.training's log has the time of each step",
        "energy_monitor": "core.training's log has the time of each step",
        "rerun_state_machine": "core.training resumes from its last checkpoint",
        "full_cuda_graph": "no step is captured in a graph",
        "nccl_allocator": "torch allocates buffers",
        "hyper_comm_grid": "use torch.distributed.device_mesh.init_device_mesh, or core.parallel_state",
        "msc_utils": "checkpoints and corpora are local files",
    },
    imported={
        "ModelParallelConfig": "core.model_parallel_config",
        "DistributedDataParallel": "core.distributed",
    },
)
