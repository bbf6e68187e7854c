"""All settings of a run, and the checks on them.

pretrain_config             one dataclass, a section per concern, and the checks across sections
sections                    the sections that belong to no other part of `core`
build                       builds settings from a flat mapping; tables of flags whose names differ from fields
arguments                   the flags that are made from fields
"""

from .pretrain_config import PretrainConfig, section_types, sequence_multiple, validate

__all__ = ["PretrainConfig", "section_types", "sequence_multiple", "validate"]
