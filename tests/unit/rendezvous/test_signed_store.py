"""A store whose values are signed, also where torch's C++ reads and writes it."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore, PrefixStore

from core.base.errors import ParallelStateError
from core.rendezvous.signed_store import SignedStore


def test_torch_reaches_what_is_signed():
    plain = HashStore()
    store = SignedStore(plain, b"secret")
    group = PrefixStore("group", store)
    group.set("key", "value")
    assert group.get("key") == b"value" == store.get("group/key") and plain.get("group/key") != b"value"
    assert group.add("count", 2) == 2 and group.check(["count", "key"])
    assert group.delete_key("key") and not plain.check(["group/key"])


@pytest.mark.parametrize("written", [b"", b"value", b"0" * 64 + b"value"])
def test_what_a_stranger_writes_is_refused(written: bytes):
    plain = HashStore()
    plain.set("key", written)
    with pytest.raises(ParallelStateError, match="'key' in the store was written by somebody without the secret"):
        SignedStore(plain, b"secret").get("key")


def test_a_value_does_not_move_to_another_key():
    plain = HashStore()
    store = SignedStore(plain, b"secret")
    store.set("key", "value")
    plain.set("other", plain.get("key"))
    with pytest.raises(ParallelStateError, match="without the secret"):
        store.get("other")
