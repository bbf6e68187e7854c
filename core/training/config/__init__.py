"""All settings of a run, the checks on them, and the command-line flags made from them.

pretrain_config             one dataclass, a section per concern, and the checks across sections
sections                    the sections that no other room has
arguments, foreign_flags    the flags; hints for those of Megatron-LM that there are none of here
"""

from .pretrain_config import PretrainConfig, division_violations, section_types, sequence_multiple, validate

__all__ = ["PretrainConfig", "division_violations", "section_types", "sequence_multiple", "validate"]
