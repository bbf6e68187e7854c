"""Weights out of any wrapper, in bounded memory: to an inference server, a file, or another run.

stream      whole tensors under another system's names, a bucket at a time
patches     only the elements that changed since the receivers' version
sender      sends both to receivers in processes of their own
receiver    receives them
shards      straight into the shards of receivers
adapters    LoRA adapters as PEFT's files
files       models of transformers from and to their files
"""

from ..dist_checkpointing.gathering import ParamMeta
from .adapters import save_adapter
from .files import load_pretrained, save_pretrained
from .patches import PatchStream, WeightPatch
from .receiver import WeightReceiver
from .sender import WeightSender
from .shards import receive_shards, send_shards
from .stream import WeightStream

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
