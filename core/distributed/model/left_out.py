"""Parameters that settings leave out of sharding, by patterns of their names: replicated ones, and ignored ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from ...base.errors import ParallelConfigError
from ..distributed_data_parallel_config import DistributedDataParallelConfig
from ..groups import LEFT_OUT, DataParallelGroups, is_expert_parameter
from ..plan.units import ParameterNames


def leave_out(
    model: nn.Module, settings: DistributedDataParallelConfig, groups: DataParallelGroups, *, shards: bool
) -> DataParallelGroups:
    """Marks the parameters that ``replicated`` and ``ignored`` name, and drops the marks of an earlier wrapper.

    Every rank calls it.

    Args:
        shards: False where every rank keeps and updates all parameters, so that ``replicated`` changes nothing.

    Returns:
        `groups`, with those of replicated parameters if there are any.

    Raises:
        ParallelConfigError: a pattern matches nothing, or one name of a tied parameter alone; a parameter is named by
            both settings, is replicated and an expert with ranks of its own, is ignored and on the meta device, or is
            a weight of two pipeline stages. Of a stage a pattern may match nothing: it may be of another's.
    """
    names = ParameterNames(model).of
    is_stage = getattr(getattr(model, "config", None), "pipeline_model_parallel_size", 1) > 1
    replicated = _matching("replicated", settings.replicated, names, is_stage)
    ignored = _matching("ignored", settings.ignored, names, is_stage)
    for parameter in names:
        vars(parameter).pop(LEFT_OUT, None)
    for parameter in (*replicated, *ignored):
        problem = ""
        if parameter in replicated and parameter in ignored:
            problem = "named by replicated and by ignored; drop one"
        elif parameter in replicated and groups.experts is not None and is_expert_parameter(parameter):
            problem = "named by replicated, and an expert with ranks of its own; give a pattern without experts"
        elif is_stage and getattr(parameter, "shared_embedding", False):
            problem = "left out, and a weight of two pipeline stages; untie the embeddings, or give another pattern"
        elif parameter in ignored and parameter.is_meta:
            problem = "named by ignored, and on the meta device, where no wrapper gives it values; materialize it"
        if problem:
            raise ParallelConfigError(f"parameter {names[parameter][0]} is {problem}")
    kinds = [*(("replicated", parameter) for parameter in replicated if shards), *(("ignored", p) for p in ignored)]
    for kind, parameter in kinds:
        setattr(parameter, LEFT_OUT, kind)
    return groups.with_replicated() if replicated and shards else groups


def _matching(
    setting: str, patterns: Sequence[str], names: Mapping[nn.Parameter, tuple[str, ...]], is_stage: bool
) -> dict[nn.Parameter, None]:
    for pattern in patterns:
        if not is_stage and not any(fnmatchcase(name, pattern) for own in names.values() for name in own):
            first = next((own[0] for own in names.values()), "decoder.weight")
            raise ParallelConfigError(
                f"{setting} has the pattern {pattern!r}, which matches no parameter; give shell patterns of whole "
                f"names, such as {first}"
            )
    parameters: dict[nn.Parameter, None] = {}
    for parameter, own in names.items():
        matched = [name for name in own if any(fnmatchcase(name, pattern) for pattern in patterns)]
        if matched and len(matched) < len(own):
            other = next(name for name in own if name not in matched)
            raise ParallelConfigError(
                f"{setting} matches {matched[0]} and not {other}, which are one tied parameter; name both, or neither"
            )
        if matched:
            parameters[parameter] = None
    return parameters
