"""Sampling: what each option leaves to draw from, and the window of a model that takes only so much."""

from __future__ import annotations

import pytest
import torch

from core import parallel_state
from core.base.errors import ConfigError, DataError
from examples.gpt.byte_tokenizer import ByteTokenizer
from examples.gpt.sampling import SamplingConfig, draw, generate_tokens, stream_text
from tests.unit._spawn import on_ranks

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0]).log_softmax(0)  # probabilities 0.64 0.24 0.09 0.03


def drawn(count: int = 400, **settings) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return [draw(LOGITS, SamplingConfig(**settings), generator) for _ in range(count)]


def test_each_option_leaves_its_tokens():
    assert set(drawn(temperature=0.0)) == {0}
    assert set(drawn(temperature=1.0)) == {0, 1, 2, 3}
    assert set(drawn(temperature=1.0, top_k=2)) == {0, 1}
    assert set(drawn(temperature=1.0, top_p=0.85)) == {0, 1}
    assert set(drawn(temperature=1.0, top_p=0.9)) == {0, 1, 2}
    assert set(drawn(temperature=1.0, top_p=0.01)) == {0}


def test_draws_have_the_models_probabilities():
    share = drawn(4000, temperature=1.0).count(0) / 4000
    assert share == pytest.approx(0.644, abs=0.03)
    assert drawn(4000, temperature=0.5).count(0) / 4000 > share + 0.1


class Counter(torch.nn.Module):
    """Expects the successor of the last token, and notes how long its inputs were."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.lengths.append(ids.shape[1])
        return torch.nn.functional.one_hot((ids + 1) % 10, 16).float() * 50


def generated(model: Counter, prompt: list[int], **settings) -> list[int]:
    greedy = SamplingConfig(temperature=0.0)
    return list(generate_tokens(model, prompt, 6, greedy, vocab_size=10, max_sequence_length=4, **settings))


def test_text_goes_on_beyond_the_window_and_ends_before_the_end():
    model = Counter()
    assert generated(model, [1, 2, 3]) == [4, 5, 6, 7, 8, 9]
    assert model.lengths == [3, 4, 4, 4, 4, 4]
    assert model.training
    assert generated(Counter(), [1, 2, 3], end=6) == [4, 5]


def test_padding_behind_the_text_changes_nothing():
    model = Counter()
    assert generated(model, [1], length_multiple=4) == [2, 3, 4, 5, 6, 7]
    assert set(model.lengths) == {4}


def test_a_window_whose_length_would_need_padding_is_shorter():
    model = Counter()
    assert generated(model, [1, 2, 3], length_multiple=3) == [4, 5, 6, 7, 8, 9]
    assert set(model.lengths) == {3}


@on_ranks(2)
def test_ranks_that_each_read_chunks_of_the_text_write_the_same():
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    assert generated(Counter(), [1, 2, 3], length_multiple=4) == [4, 5, 6, 7, 8, 9]


def test_an_empty_prompt_is_refused():
    with pytest.raises(DataError, match="empty"):
        generated(Counter(), [])


@pytest.mark.parametrize("settings", [{"temperature": float("nan")}, {"top_k": -1}, {"top_p": 1.5}, {"seed": -1}])
def test_numbers_out_of_range_are_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        SamplingConfig(**settings)


def test_text_comes_in_whole_characters():
    tokenizer = ByteTokenizer()
    text = "é und 漢字 🙂!"
    pieces = list(stream_text(tokenizer, iter(tokenizer.encode(text).tolist())))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    cut = tokenizer.encode("漢").tolist()[:2]
    assert "".join(stream_text(tokenizer, iter(cut))) == tokenizer.decode(cut)
