"""Fabric's switch of gradient synchronisation, and the wrapper of a module that Fabric passes around."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import nn

from ...distributed import _BaseDataParallel
from ...distributed.parameter_owner import owner_of
from ...errors import ConfigError


class NoSync(_BackwardSyncControl):
    """Fabric's ``no_backward_sync``: `no_sync` of the wrapper, noted so that `backward` finishes no gradients."""

    def __init__(self) -> None:
        # Wrappers whose micro-batches accumulate at the moment; set and cleared by `no_backward_sync`.
        self.accumulating: set[nn.Module] = set()

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Lets gradients accumulate on this rank where `enabled`."""
        return self._entered(module) if enabled else nullcontext()

    @contextmanager
    def _entered(self, module: nn.Module) -> Iterator[None]:
        self.accumulating.add(module)
        try:
            with wrapper_of(module).no_sync():
                yield
        finally:
            self.accumulating.discard(module)


def wrapper_of(module: nn.Module) -> _BaseDataParallel:
    """Returns the wrapper of a module, or the module if it is one.

    Raises:
        ConfigError: it has none.
    """
    wrapper = module if isinstance(module, _BaseDataParallel) else owner_of(next(module.parameters(), None))
    if not isinstance(wrapper, _BaseDataParallel):
        raise ConfigError(
            f"{type(module).__name__} is not wrapped; give it to fabric.setup or fabric.setup_module first"
        )
    return wrapper
