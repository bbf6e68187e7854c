"""Chooses which parameters Muon updates, and builds it: all that `get_megatron_optimizer` knows of Muon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ...base.errors import ConfigError
from ...process_groups_config import ProcessGroupCollection
from ..main_params import MainParam
from ..param_groups import override_of
from ..update_rules import MakeGroups, RuleBuilder
from .rule import Muon

_OUTPUT_LAYERS = ("lm_head", "output_layer")
"""Names of modules of other libraries that project to the vocabulary."""


class MuonBuilder(RuleBuilder):
    """Gives matrices to Muon, and the rest to the scalar optimizer."""

    def choose(self, params: Sequence[MainParam]) -> dict[MainParam, str]:
        """Returns why each parameter is the scalar optimizer's, or empty text if Muon updates it.

        An override decides, else the config's patterns, else the rule. The rule gives Muon all matrices, and batches
        of matrices `[n, rows, columns]`, but for embeddings, outputs, and what the model marks by Megatron-LM's
        attribute ``use_muon`` as False, as routers.

        Raises:
            ConfigError: an override names an unknown optimizer, or Muon is requested for a parameter that is no
                matrix.
        """
        return {p: self._reason(p) for p in params}

    def check(self, of_model: Mapping[str, str]) -> None:
        """Checks the choice for the whole model.

        Raises:
            ConfigError: no parameter is trained, a pattern of Muon's matches none, or it gets none.
        """
        super().check(of_model)
        if all(of_model.values()):
            raise ConfigError(
                f"optimizer is muon, and none of the {len(of_model)} trained parameters is a matrix of a hidden "
                "layer; set optimizer to adam, or name parameters in muon_include"
            )
        for pattern in (*self.config.muon_include, *self.config.muon_exclude):
            if not any(fnmatchcase(name, pattern) for name in of_model):
                first, *_, last = [*of_model] * 2
                raise ConfigError(
                    f"muon_include or muon_exclude {pattern!r} matches no parameter that is trained; names are as "
                    f"{first} and {last}"
                )

    def groups(self, reasons: Mapping[MainParam, str], make: MakeGroups) -> list[dict[str, Any]]:
        """Makes groups of each optimizer apart, and names it in them as ``optimizer``."""
        groups = list[dict[str, Any]]()
        for name, is_other in (("muon", False), (self.config.muon_scalar_optimizer, True)):
            own = [p for p in reasons if bool(reasons[p]) == is_other]
            groups += [group | {"optimizer": name} for group in make(own)]
        return groups

    def build(
        self, groups: list[dict[str, Any]], reasons: Mapping[MainParam, str], model_groups: ProcessGroupCollection
    ) -> Muon:
        return Muon(groups, self.config, reasons, model_groups)

    def _reason(self, p: MainParam) -> str:
        patterns = {"muon": self.config.muon_include, self.config.muon_scalar_optimizer: self.config.muon_exclude}
        matching = [name for name, of in patterns.items() if any(fnmatchcase(p.name, pattern) for pattern in of)]
        rule = override_of(self.overrides, p.name, p.param).get("optimizer", next(iter(matching), None))
        if rule not in (None, *patterns):
            raise ConfigError(
                f"config_overrides gives parameter {p.name} the optimizer {rule!r}; it takes "
                f"{' or '.join(map(repr, patterns))}"
            )
        if rule == "muon" and not _is_matrix(p):
            raise ConfigError(
                f"muon is requested for parameter {p.name} of shape {list(p.param.shape)}; it takes matrices, or "
                "batches of them in three dimensions"
            )
        return _reason_against(p) if rule is None else "" if rule == "muon" else "requested"


def _is_matrix(p: MainParam) -> bool:
    return p.param.ndim in (2, 3) and not isinstance(p.owner, nn.modules.conv._ConvNd)


def _reason_against(p: MainParam) -> str:
    """Returns why the rule does not give a parameter to Muon. Empty if it does."""
    if p.param.ndim < 2 or p.attribute == "bias":  # that of experts is a batch of vectors
        return "vector"
    if (
        getattr(p.param, "is_embedding_or_output_parameter", False)
        or isinstance(p.owner, nn.Embedding)
        or any(part in _OUTPUT_LAYERS for part in p.name.split("."))
    ):
        return "embedding or output"
    if not getattr(p.param, "use_muon", True):
        return "marked use_muon=False"
    return "" if _is_matrix(p) else "convolution"
