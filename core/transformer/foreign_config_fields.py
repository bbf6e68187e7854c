"""Fields of Megatron-LM's TransformerConfig that the one here does not have. See `core.foreign_arguments`."""

from __future__ import annotations

from typing import Any

from ..foreign_arguments import ForeignFields

_ONE_STAGE = "models here have one pipeline stage"
_ONE_ROUTER = "routers here are those that the fields moe_router_* describe"
_NO_QUANTISATION = "set bf16 or fp16"
_ONE_KIND = "layers here are those of a GPT: an attention and an MLP in each"

_REFUSED: dict[str, tuple[Any, str]] = {
    "mtp_num_layers": (None, "models here predict the next token alone"),
    "num_layers_in_first_pipeline_stage": (None, _ONE_STAGE),
    "num_layers_in_last_pipeline_stage": (None, _ONE_STAGE),
    "pipeline_model_parallel_layout": (None, _ONE_STAGE),
    "account_for_embedding_in_pipeline_split": (False, _ONE_STAGE),
    "account_for_loss_in_pipeline_split": (False, _ONE_STAGE),
    "softmax_scale": (None, "attention scales by 1 / sqrt(kv_channels)"),
    "softmax_type": ("vanilla", "attention here has torch's softmax"),
    "fp32_residual_connection": (False, "train in fp32, or leave the residual stream in the compute dtype"),
    "apply_residual_connection_post_layernorm": (False, "layers here are pre-norm"),
    "layernorm_zero_centered_gamma": (False, "add 1 to the weights that are loaded"),
    "glu_linear_offset": (0.0, "give activation_func a function"),
    "activation_func_clamp_value": (None, "give activation_func a function"),
    "activation_func_fp8_input_store": (False, _NO_QUANTISATION),
    "moe_token_dropping": (False, "give moe_expert_capacity_factor"),
    "moe_router_topk_limited_devices": (None, "use moe_router_num_groups and moe_router_group_topk"),
    "moe_router_force_load_balancing": (False, _ONE_ROUTER),
    "moe_router_force_biased": (None, _ONE_ROUTER),
    "moe_enable_routing_replay": (False, _ONE_ROUTER),
    "moe_n_hash_layers": (0, _ONE_ROUTER),
    "moe_apply_probs_on_input": (False, "probabilities multiply the outputs of experts"),
    "moe_latent_size": (None, "experts have the width of the residual stream"),
    "rotary_interleaved": (False, "channel i turns with channel i + r / 2; reorder the weights that are loaded"),
    "window_size": (None, "give the model an attention_mask"),
    "window_attn_skip_freq": (None, "give the model an attention_mask"),
    "qk_l2_norm": (False, "use qk_layernorm"),
    "qk_clip": (False, "use qk_layernorm"),
    "attention_output_gate": (False, _ONE_KIND),
    "test_mode": (False, "drop it"),
    "multi_latent_attention": (False, _ONE_KIND),
    "no_rope_freq": (None, "every layer rotates, or none"),
    "experimental_attention_variant": (None, _ONE_KIND),
    "linear_attention_freq": (None, _ONE_KIND),
    "is_hybrid_model": (False, _ONE_KIND),
    "heterogeneous_block_specs": (False, "give GPTModel a transformer_layer_spec"),
    "mrope_section": (None, "use position_embedding_type 'rope'"),
    "init_model_with_meta_device": (False, "build the model under torch.device('meta'), then materialize it"),
    "use_mup": (False, "give init_method, and learning rates by get_megatron_optimizer's scale_lr_cond"),
    "apply_query_key_layer_scaling": (False, "attention here computes its softmax in fp32 in any case"),
    "recompute_modules": (None, "recompute_granularity 'selective' recomputes the core of attention"),
    "fp8": (None, _NO_QUANTISATION),
    "fp8_param": (False, _NO_QUANTISATION),
    "fp4": (None, _NO_QUANTISATION),
    "fp4_param": (False, _NO_QUANTISATION),
    "quant_recipe": (None, _NO_QUANTISATION),
    "use_kitchen": (False, _NO_QUANTISATION),
    "batch_invariant_mode": (False, "call core.device.compute_deterministically() before anything else"),
    "config_logger_dir": ("", "use core.training's --log-dir"),
}

_IGNORED: dict[str, Any] = {
    "flash_attention_version": None,
    "transformer_impl": "local",
    "log_max_attention_logit": False,
    "attention_softmax_in_fp32": True,
    "disable_bf16_reduced_precision_matmul": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "memory_efficient_layer_norm": False,
    "apply_rope_fusion": False,
    "fused_single_qkv_rope": False,
    "fused_residual_rmsnorm": False,
    "use_fused_weighted_squared_relu": False,
    "use_transformer_engine_op_fuser": False,
    "use_te_activation_func": False,
    "distribute_saved_activations": False,
    "tp_only_amax_red": False,
    "first_last_layers_bf16": False,
    "num_layers_at_start_in_bf16": 1,
    "num_layers_at_end_in_bf16": 1,
    "kitchen_attention_backend": "sdpa",
    "use_kitchen_attention": False,
    "high_priority_a2a_comm_stream": False,
    "use_grouped_gemm_for_shared_expert": False,
    "use_grouped_gemm_for_dense_mlp": False,
    "cp_comm_type": None,
    "enable_cuda_graph": False,
    "external_cuda_graph": False,
    "clone_scatter_output_in_embedding": True,
    "disable_parameter_transpose_cache": False,
    "flash_decode": False,
    "symmetric_ar_type": None,
    "nccl_all_reduce_for_prefill": False,
    "use_inference_optimized_layers": False,
    "mlp_chunks_for_prefill": 1,
    "mlp_chunks_for_training": 1,
    "hetereogenous_dist_checkpoint": False,
    "use_mamba_mem_eff_path": True,
    "fine_grained_activation_offloading": False,
    "offload_modules": None,
    "min_offloaded_tensor_size": 2**20,
    "delay_offload_until_cuda_graph": False,
    "delta_offload_bytes_across_pp_ranks": 0,
    "activation_offload_fraction": 1.0,
    "fine_grained_offloading_max_inflight_offloads": None,
}

FOREIGN_FIELDS = ForeignFields(
    refused=_REFUSED,
    ignored=_IGNORED,
    inert_prefixes=(
        *("mtp_", "moe_", "dsa_", "linear_", "mup_", "qk_clip_", "fp8_", "fp4_", "mamba_", "inference_"),
        *("cuda_graph_", "experimental_attention_variant_"),
    ),
)
"""Fields with these prefixes configure refused features, graphs, or inference; those of experts say where and how fast
they are computed."""
