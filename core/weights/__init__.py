"""Weights out of any wrapper, in bounded memory: to an inference server, a file, or another run.

stream      whole tensors under another system's names, a bucket at a time, or straight into the shards of receivers
patches     only the elements that changed since the receivers' version
sender      sends both to receivers in processes of their own
receiver    receives them, over a group and a store that both share
files       models of transformers from and to their files, and LoRA adapters as PEFT's
"""

from ..dist_checkpointing.gathering import ParamMeta
from .files import load_pretrained, save_adapter, save_pretrained
from .patches import PatchStream, WeightPatch
from .receiver import WeightReceiver
from .sender import WeightSender
from .stream import WeightStream, receive_shards, send_shards

__all__ = [
    "ParamMeta",
    "PatchStream",
    "WeightPatch",
    "WeightReceiver",
    "WeightSender",
    "WeightStream",
    "load_pretrained",
    "receive_shards",
    "save_adapter",
    "save_pretrained",
    "send_shards",
]
