"""A store whose values are signed with the secret of the job: what a stranger writes is refused.

Torch's stores take keys from every client. Through this one ranks find each other's addresses, and servers of weights
what is sent to them. Counters (`add`) are computed by the server, and not signed: a stranger can hold up those who
wait for one, and no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # public, but left out of __all__

from ..base.errors import ParallelStateError
from ..base.files import brief
from .job_secret import is_signed, signature

_SIGNATURE_BYTES = 64


class SignedStore(Store):
    """Signs each value with its key, and checks what it reads.

    Args:
        store: the one that holds the values, for any client.
        secret: of the job.
    """

    def __init__(self, store: Any, secret: bytes) -> None:
        super().__init__()
        self._store, self._secret = store, secret

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(key, signature(self._secret, key, data).encode() + data)

    def get(self, key: str) -> bytes:
        """Returns a value, after waiting for it.

        Raises:
            ParallelStateError: it was not signed by one who knows the secret.
        """
        signed = bytes(self._store.get(key))
        given, data = signed[:_SIGNATURE_BYTES], signed[_SIGNATURE_BYTES:]
        if not is_signed(given.decode("latin-1"), self._secret, key, data):
            raise ParallelStateError(
                f"{brief(key)} in the store was written by somebody without the secret of the job; give all of its "
                "parts the same one, and look for who else connects to the store's port"
            )
        return data

    def add(self, key: str, value: int) -> int:
        return int(self._store.add(key, value))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._store.check(list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._store.wait(list(keys), timeout or self._store.timeout)

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(key))

    deleteKey = delete_key  # what torch's C++ calls it

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> Any:
        return SignedStore(self._store.clone(), self._secret)
