"""Models built from `core.transformer`."""

from ..absent_names import absent_names

_GPT = "the models here are decoders; core.models.gpt"

__getattr__ = absent_names(
    __name__,
    dict.fromkeys(("T5", "audio", "bert", "hybrid", "mamba", "mimo", "multimodal", "vision"), _GPT)
    | {
        "backends": "layers are this package's; core.models.gpt.gpt_layer_specs",
        "huggingface": "use core.models.gpt.hugging_face",
    },
)
