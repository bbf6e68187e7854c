"""Computes the angles of rotary position embeddings (Su et al., 2021)."""

from __future__ import annotations

import torch
from torch import nn

from ....base.errors import ConfigError
from ....base.megatron_names import checks_arguments
from ....transformer.attention import Rotation, apply_rotary_pos_emb

__all__ = ["RotaryEmbedding", "apply_rotary_pos_emb"]


class RotaryEmbedding(nn.Module):
    """Cosines and sines of position x base^(-2i / r) for the first r = kv_channels x rotary_percent channels.

    It has neither parameters nor buffers, so that casts, sharding and construction on meta do not change the angles:
    they are computed in fp32 on the given device, and those of the last length are cached.

    Args:
        rotary_interleaved, seq_len_interpolation_factor, rope_scaling: Megatron-LM's arguments; refused unless at
            their defaults.
        rope_scaling_factor: used only with `rope_scaling`.
        use_cpu_initialization, cp_group: Megatron-LM's arguments; ignored, as angles are computed on the given device.

    Raises:
        ConfigError: the number of rotated channels is not even.
        ParallelConfigError: an argument that is refused.
    """

    is_unit = True

    @checks_arguments
    def __init__(self, kv_channels: int, rotary_percent: float = 1.0, rotary_base: float = 10000.0) -> None:
        super().__init__()
        self.size, self.base = int(kv_channels * rotary_percent), float(rotary_base)
        if self.size < 2 or self.size % 2:
            raise ConfigError(
                f"kv_channels {kv_channels} x rotary_percent {rotary_percent:g} is {self.size} rotated channels, and "
                "channels turn in pairs; choose sizes that give an even number from 2"
            )
        # The last length and device, and their angles. `forward` sets it; None before the first forward.
        self._last_rotation: tuple[tuple[int, torch.device], Rotation] | None = None

    def forward(self, max_seq_len: int, *, device: torch.device, position_ids: torch.Tensor | None = None) -> Rotation:
        """Returns cosine and sine in fp32, `[s, 1, 1, r]` each, or `[s, b, 1, r]` with explicit positions.

        Args:
            max_seq_len: length of the whole sequence, also if a rank has a part of the activations.
            position_ids: `[b, s]`; None is 0 to s - 1 in every row.
        """
        if position_ids is not None:
            return self._rotation(position_ids.t())
        key = (max_seq_len, device)
        if self._last_rotation is not None and self._last_rotation[0] == key:
            return self._last_rotation[1]
        rotation = self._rotation(torch.arange(max_seq_len, device=device).unsqueeze(1))
        # Tensors of these modes must not be cached.
        if not (torch.is_inference_mode_enabled() or torch.compiler.is_compiling()):
            self._last_rotation = key, rotation
        return rotation

    def _rotation(self, positions: torch.Tensor) -> Rotation:
        """Maps positions `[s, b or 1]` to angles `[s, b or 1, 1, r]`."""
        exponents = torch.arange(0, self.size, 2, dtype=torch.float32, device=positions.device) / self.size
        angles = positions.float().unsqueeze(-1) / self.base**exponents  # [s, b or 1, r / 2]
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(2)
        return angles.cos(), angles.sin()
