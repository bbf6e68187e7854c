"""Settings of the optimizer: the update rule, its constants, clipping and loss scaling."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from ..megatron_names import takes_megatron_fields
from ..ranges import check_choices, check_range

OPTIMIZERS = ("adam", "sgd")


@takes_megatron_fields
@dataclass(kw_only=True)
class OptimizerConfig:
    """Settings of :func:`~core.optimizer.get_megatron_optimizer`, with Megatron-LM's field names and defaults.

    Raises:
        ConfigError: an unknown optimizer, a number out of its range, or settings that contradict each other.
    """

    optimizer: str = "adam"
    """``"adam"``: AdamW, with decoupled weight decay (Loshchilov & Hutter, 2019). ``"sgd"``: SGD with momentum."""

    lr: float | None = None
    """Learning rate, or the peak of the schedule. Must be set before an optimizer is built."""

    min_lr: float | None = None
    """Floor of the schedule. None means the scheduler's own ``min_lr``."""

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

    clip_grad: float = 1.0
    """Largest global L2 norm of the gradient. 0 turns clipping off; the norm is measured and returned either way."""

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
    """Whether the script expects state that is sharded over flat buffers. The model's wrapper decides; building the
    optimizer raises if the wrapper differs. None expects nothing."""

    def __post_init__(self) -> None:
        check_choices(self, optimizer=OPTIMIZERS)
        if self.fp16 and self.bf16:
            raise ConfigError("fp16 and bf16 are both set; choose one")
        check_range(self, "lr", "min_lr", "weight_decay", "clip_grad", least=0)
        share = "a number from 0 up to, not including, 1"
        check_range(self, "adam_beta1", "adam_beta2", "sgd_momentum", least=0, below=1, takes=share)
        check_range(self, "adam_eps", "loss_scale", "initial_loss_scale", "min_loss_scale", over=0)
        check_range(self, "loss_scale_window", "hysteresis", least=1, takes="a positive integer")
        if self.lr is not None and self.min_lr is not None and self.min_lr > self.lr:
            raise ConfigError(f"min_lr is {self.min_lr}, above lr {self.lr}; the schedule falls from lr to min_lr")
        if self.min_loss_scale > self.initial_loss_scale:
            raise ConfigError(
                f"min_loss_scale is {self.min_loss_scale}, above initial_loss_scale {self.initial_loss_scale}; "
                "lower the one or raise the other"
            )
