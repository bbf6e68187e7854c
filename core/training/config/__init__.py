"""All settings of a run, the checks on them, and the command-line flags made from them.

pretrain_config             one dataclass, a section per concern, and the checks across sections
sections                    the sections that belong to no other part of `core`
arguments, foreign_flags    the flags; hints for Megatron-LM's flags that do not exist here
"""

from .pretrain_config import PretrainConfig, division_violations, section_types, sequence_multiple, validate

__all__ = ["PretrainConfig", "division_violations", "section_types", "sequence_multiple", "validate"]
