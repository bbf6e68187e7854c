"""The padded vocabulary, and ids outside it."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from core.base.errors import ConfigError, DataError
from core.tensor_parallel import pad_vocab_size
from core.tensor_parallel.groups import check_ids


@pytest.mark.parametrize(("size", "multiple", "padded"), [(1, 128, 128), (128, 128, 128), (257, 128, 384), (7, 1, 7)])
def test_padding(size: int, multiple: int, padded: int):
    assert pad_vocab_size(size, multiple) == padded


@pytest.mark.parametrize(("size", "multiple"), [(0, 128), (5, 0)])
def test_padding_of_nothing_is_an_error(size: int, multiple: int):
    with pytest.raises(ConfigError, match=f"vocabulary of {size} padded to a multiple of {multiple}"):
        pad_vocab_size(size, multiple)


def test_the_first_id_outside_is_named_unless_allowed():
    check_ids(torch.tensor([-100, 0, 9]), 10, "target", exception=-100)
    check_ids(torch.empty(0, dtype=torch.long), 10, "token")
    with pytest.raises(DataError, match=r"target id 10 .* 10 tokens \(0 to 9\)"):
        check_ids(torch.tensor([[-100, 10, 11]]), 10, "target", exception=-100)


def test_meta_and_fake_ids_are_not_checked():
    check_ids(torch.empty(3, dtype=torch.long, device="meta"), 10, "token")
    with FakeTensorMode():
        check_ids(torch.full((3,), 99), 10, "token")
