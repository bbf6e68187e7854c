"""Weights out of any wrapper, in bounded memory: to an inference server, a file, or another run.

stream      whole tensors under another system's names, a bucket at a time
patches     only the elements that changed since the receivers' version
transport   sends both to receivers in processes of their own, and receives them
adapters    LoRA adapters as PEFT's files
"""

from .adapters import save_adapter
from .patches import PatchStream, WeightPatch
from .stream import ParamMeta, WeightStream
from .transport import WeightReceiver, WeightSender

__all__ = [
    "ParamMeta",
    "PatchStream",
    "WeightPatch",
    "WeightReceiver",
    "WeightSender",
    "WeightStream",
    "save_adapter",
]
