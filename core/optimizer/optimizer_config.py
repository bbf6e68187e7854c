"""Settings of the optimizer: the update rule, its constants, clipping, and loss scaling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from ..base.errors import ConfigError, check_choices, check_range
from ..base.megatron_names import takes_megatron_fields

OPTIMIZERS = ("adam", "sgd", "muon")

StateDtype = Literal["fp32", "bf16", "dynamic8", "linear8"]
MainDtype = Literal["fp32", "bf16", "bf16_with_rest"]

Preset = Literal["moonlight", "keller-jordan", "megatron", "torch"]
ScaleMode = Literal["spectral", "shape_scaling", "unit_rms_norm"]
CoefficientType = Literal["simple", "quintic", "polar_express", "cans", "aol", "deepseekv4"]
Precision = Literal["medium", "high", "highest"]


@takes_megatron_fields
@dataclass(kw_only=True)
class OptimizerConfig:
    """Settings of :func:`~shardstack.optimizer.get_megatron_optimizer`, with Megatron-LM's field names and defaults.

    Raises:
        ConfigError: an unknown optimizer, a number out of its range, or settings that contradict each other.
    """

    optimizer: str = "adam"
    """``"adam"``: AdamW, with decoupled weight decay (Loshchilov & Hutter, 2019). ``"sgd"``: SGD with momentum.
    ``"muon"``: Muon for hidden matrices, and `muon_scalar_optimizer` for the rest."""

    lr: float | None = None
    """Learning rate, or the peak of the schedule. Must be set before an optimizer is built."""

    min_lr: float | None = None
    """Floor of the schedule. None means the scheduler's own ``min_lr``."""

    decoupled_lr: float | None = None
    """Peak of the learning rate of embeddings and of the output projection. None: that of all parameters."""

    decoupled_min_lr: float | None = None
    """Floor of their learning rate. None: that of all parameters."""

    weight_decay: float = 0.01
    """Weight decay. Biases and 1-D parameters (norms) have none unless the parameter groups say otherwise."""

    adam_beta1: float = 0.9
    """Decay of Adam's running mean of the gradient."""

    adam_beta2: float = 0.999
    """Decay of Adam's running mean of the squared gradient."""

    adam_eps: float = 1e-8
    """Added to the denominator of Adam's update."""

    sgd_momentum: float = 0.9
    """Momentum of SGD. With 0 there is no momentum buffer."""

    muon_preset: Preset | None = None
    """Published recipe of Muon: ``"moonlight"`` (Liu et al., 2025), ``"keller-jordan"``, ``"megatron"`` (the defaults
    of Megatron-LM's config), or ``"torch"`` (of `torch.optim.Muon`). None: moonlight's, with the settings below in
    place of its own."""

    muon_momentum: float | None = None
    """Momentum of Muon. None: the preset's value, 0.95 in all presets."""

    muon_nesterov: bool | None = None
    """Add the gradient to its momentum once more. None: the preset's."""

    muon_scale_mode: ScaleMode | None = None
    """Factor of an orthogonal update: ``"spectral"``, the root of the larger side, ``"shape_scaling"``, the root of
    rows / columns, at least 1, or ``"unit_rms_norm"``, that root. None: the preset's."""

    muon_extra_scale_factor: float | None = None
    """Another factor of the update. None: the preset's, 0.2 in moonlight's, which gives it AdamW's usual size."""

    muon_num_ns_steps: int | None = None
    """Newton-Schulz iterations. None: the preset's value, 5 in all presets."""

    muon_coefficient_type: CoefficientType | None = None
    """Coefficients of the iterations, by Megatron-LM's names. None: the preset's."""

    muon_fp32_matmul_prec: Precision | None = None
    """How the iterations multiply: ``"medium"`` in bf16, ``"high"`` in TF32 where a GPU has it, ``"highest"`` in fp32.
    None: the preset's, ``"medium"`` in all of them."""

    muon_tp_mode: Literal["duplicated", "distributed", "blockwise"] = "duplicated"
    """How Megatron-LM updates a matrix that tensor parallelism cuts. Here it is always updated whole, as in the first
    two modes. ``"blockwise"``, whose update depends on the number of ranks, is refused."""

    muon_split_qkv: bool = True
    """Update a fused projection as three matrices: queries, keys and values."""

    muon_split_qkv_per_head: bool = False
    """Update each head's queries, keys and values as matrices of their own."""

    muon_split_gate_up: bool | None = None
    """Update a fused gate and up projection as two matrices. None: the preset's, two but in megatron's."""

    muon_include: tuple[str, ...] = ()
    """Update parameters whose names match these shell patterns by Muon, also where the rule does not."""

    muon_exclude: tuple[str, ...] = ()
    """Update parameters whose names match these shell patterns by `muon_scalar_optimizer`."""

    muon_scalar_optimizer: Literal["adam", "lion"] = "adam"
    """Optimizer of what Muon does not update: embeddings, outputs, routers, vectors. ``"adam"`` is AdamW, ``"lion"``
    Lion (Chen et al., 2023)."""

    lion_beta1: float = 0.95
    """Lion's share of the momentum in an update."""

    lion_beta2: float = 0.98
    """Decay of Lion's momentum."""

    muon_momentum_holder: Literal["shards", "owners"] = "shards"
    """Who keeps the momentum of a matrix: the ranks that keep its elements, each its part, or the rank that updates
    it, which saves memory where parameters are replicated."""

    exp_avg_dtype: StateDtype = "fp32"
    """How first moments and momenta are kept: ``"bf16"``, rounded stochastically, or 8 bits in blocks of 256 elements,
    ``"dynamic8"`` or ``"linear8"`` (see `shardstack.optimizer.low_precision.formats`). Arithmetic is in fp32, and the
    same bits on any cut. Tensors of less than 4096 elements stay in fp32 where others have 8 bits."""

    exp_avg_sq_dtype: StateDtype = "fp32"
    """How second moments are kept."""

    main_params_dtype: MainDtype = "fp32"
    """What an update of parameters in bf16 writes to: a master copy in ``"fp32"``, or ``"bf16_with_rest"``, the
    parameter and the 16 bits that it lacks, which is as exact and takes 2 bytes less, or ``"bf16"``, the parameter
    alone, rounded stochastically, which takes 4 bytes less."""

    clip_grad: float = 1.0
    """Largest global L2 norm of the gradient. 0 turns clipping off. The norm is measured and returned either way."""

    fp16: bool = False
    """Scale the loss dynamically, for gradients computed in fp16."""

    bf16: bool = False
    """Whether gradients are computed in bf16, which needs no loss scale."""

    loss_scale: float | None = None
    """A constant loss scale in place of the dynamic one."""

    initial_loss_scale: float = 2.0**32
    """First value of the dynamic loss scale."""

    min_loss_scale: float = 1.0
    """Minimum of the dynamic loss scale."""

    loss_scale_window: int = 1000
    """Steps without overflow after which the dynamic loss scale doubles."""

    hysteresis: int = 2
    """Overflows since the scale last grew, after which the dynamic loss scale halves."""

    log_num_zeros_in_grad: bool = False
    """Count the gradient's zeros in the pass that measures its norm."""

    use_distributed_optimizer: bool | None = None
    """Whether the script expects state that is sharded over flat buffers. The model's wrapper decides. Building the
    optimizer raises if the wrapper differs. None expects nothing."""

    def __post_init__(self) -> None:
        check_choices(self, optimizer=OPTIMIZERS)
        self._name_dtypes()
        if self.fp16 and self.bf16:
            raise ConfigError("fp16 and bf16 are both set; choose one")
        check_range(self, "lr", "min_lr", "weight_decay", "clip_grad", least=0)
        check_range(self, "decoupled_lr", "decoupled_min_lr", least=0)
        if self.decoupled_lr is None and self.decoupled_min_lr is not None:
            raise ConfigError(f"decoupled_min_lr is {self.decoupled_min_lr} without decoupled_lr; set both")
        share = "a number from 0 up to, not including, 1"
        momenta = ("adam_beta1", "adam_beta2", "lion_beta1", "lion_beta2", "sgd_momentum", "muon_momentum")
        check_range(self, *momenta, least=0, below=1, takes=share)
        if self.optimizer == "muon":
            self._check_muon()
        check_range(self, "adam_eps", "loss_scale", "initial_loss_scale", "min_loss_scale", over=0)
        check_range(self, "loss_scale_window", "hysteresis", least=1, takes="a positive integer")
        if self.lr is not None and self.min_lr is not None and self.min_lr > self.lr:
            raise ConfigError(f"min_lr is {self.min_lr}, above lr {self.lr}; the schedule falls from lr to min_lr")
        if self.min_loss_scale > self.initial_loss_scale:
            raise ConfigError(
                f"min_loss_scale is {self.min_loss_scale}, above initial_loss_scale {self.initial_loss_scale}; "
                "lower the one or raise the other"
            )

    def _name_dtypes(self) -> None:
        """Takes torch's dtypes, as Megatron-LM's config does, for the names here."""
        for field in ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype"):
            names = {torch.float32: "fp32", torch.bfloat16: "bf16"}
            setattr(self, field, names.get(getattr(self, field), getattr(self, field)))
        moments = get_args(StateDtype)
        check_choices(self, exp_avg_dtype=moments, exp_avg_sq_dtype=moments, main_params_dtype=get_args(MainDtype))
        has_second = "adam" in (self.optimizer, self.optimizer == "muon" and self.muon_scalar_optimizer)
        is_kept = {"exp_avg_dtype": self.optimizer != "sgd" or self.sgd_momentum, "exp_avg_sq_dtype": has_second}
        for field in (field for field in is_kept if not is_kept[field]):
            if (dtype := getattr(self, field)) != "fp32":
                raise ConfigError(f"{field} is {dtype}, and {self.optimizer} keeps none here; leave it at fp32")

    @property
    def keeps_low_precision(self) -> bool:
        """Whether moments or masters are kept in fewer than 32 bits."""
        return {self.exp_avg_dtype, self.exp_avg_sq_dtype, self.main_params_dtype} != {"fp32"}

    def _check_muon(self) -> None:
        check_choices(self, True, muon_preset=get_args(Preset), muon_coefficient_type=get_args(CoefficientType))
        check_choices(self, True, muon_scale_mode=get_args(ScaleMode), muon_fp32_matmul_prec=get_args(Precision))
        check_choices(self, muon_scalar_optimizer=("adam", "lion"), muon_momentum_holder=("shards", "owners"))
        check_range(self, "muon_num_ns_steps", least=1, takes="a positive integer")
        check_range(self, "muon_extra_scale_factor", over=0)
        if self.muon_tp_mode == "blockwise":
            raise ConfigError(
                "muon_tp_mode is blockwise, which changes the update with the tensor-parallel size; set duplicated, "
                "as matrices are updated whole"
            )
        if self.muon_momentum_holder == "owners" and self.exp_avg_dtype != "fp32":
            raise ConfigError(
                f"exp_avg_dtype is {self.exp_avg_dtype} with muon_momentum_holder owners, whose momenta are whole "
                "matrices in fp32; set muon_momentum_holder to shards"
            )
        if self.muon_split_qkv_per_head and not self.muon_split_qkv:
            raise ConfigError("muon_split_qkv_per_head splits fused projections, and muon_split_qkv is off; drop one")
        from .muon_recipe import recipe_of  # loaded with Muon alone

        recipe_of(self)  # raises if the preset and a setting contradict each other
