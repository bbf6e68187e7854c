"""Generates text: draws one token after the other from the model's prediction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from shardstack import parallel_state
from shardstack.base import device
from shardstack.base.errors import DataError, check_range
from shardstack.tokenizers import Tokenizer
from shardstack.transformer.sequences import own_chunks, own_positions


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Settings for drawing the next token.

    Raises:
        ConfigError: a number is out of its range.
    """

    temperature: float = 0.8
    """Divides the logits: below 1 likely tokens become likelier; 0 always takes the likeliest one."""

    top_k: int = 0
    """Draw only from the k likeliest tokens; 0 draws from all."""

    top_p: float = 1.0
    """Draw from the fewest tokens whose probabilities reach this sum (Holtzman et al., 2020)."""

    seed: int = 0
    """Seed of the draws."""

    def __post_init__(self) -> None:
        check_range(self, "temperature", least=0)
        check_range(self, "top_k", least=0, takes="zero or a positive number of tokens")
        check_range(self, "top_p", over=0, most=1, takes="a probability above 0 and up to 1")
        check_range(self, "seed", least=0, below=2**63)


def generate_tokens(
    model: nn.Module,
    prompt: Sequence[int],
    num_tokens: int,
    config: SamplingConfig,
    *,
    vocab_size: int,
    max_sequence_length: int,
    end: int | None = None,
    length_multiple: int = 1,
) -> Iterator[int]:
    """Yields up to `num_tokens` ids that continue `prompt`, and stops before `end`.

    All ranks of a distributed model draw in step, and get the first rank's tokens. Context-parallel ranks take their
    chunks of the text. Text longer than `max_sequence_length` is continued from its last tokens.

    Args:
        model: returns logits `[b, s, v]` of the whole vocabulary; its training mode is restored.
        vocab_size: logits that belong to a token; the rest is padding.
        length_multiple: the text's length is padded to a multiple of this, for sequence or context parallelism.
    """
    if not prompt:
        raise DataError("the prompt is empty, and a model continues something; give at least one token")
    generator = torch.Generator().manual_seed(config.seed)
    ids = list(prompt)
    longest = max_sequence_length - max_sequence_length % length_multiple
    was_training = model.training
    model.eval()
    try:
        for _ in range(num_tokens):
            window = ids[-longest:]
            padding = [0] * (-len(window) % length_multiple)  # after the text, which a causal model does not see
            with torch.no_grad():
                logits = _logits_at(len(window) - 1, model, window + padding)[:vocab_size].float().cpu()  # [v]
            token = torch.tensor([draw(logits, config, generator)], device=device.current_device())
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.broadcast(token, src=0)
            if int(token) == end:
                return
            ids.append(int(token))
            yield ids[-1]
    finally:
        model.train(was_training)


def _logits_at(position: int, model: nn.Module, ids: Sequence[int]) -> torch.Tensor:
    """Returns the logits of the token after `position`, `[v]`, on every rank."""
    whole = torch.tensor([ids], device=device.current_device())
    logits = model(own_chunks(whole))[0]  # [s / cp, v]
    if parallel_state.get_context_parallel_world_size() == 1:
        found: torch.Tensor = logits[position]
        return found
    is_here = own_positions(len(logits), logits.device) == position
    found = torch.where(is_here[:, None], logits, 0.0).sum(0)
    dist.all_reduce(found, group=parallel_state.get_context_parallel_group())
    return found


def draw(logits: torch.Tensor, config: SamplingConfig, generator: torch.Generator) -> int:
    """Draws a token id from the logits `[v]` of the next token."""
    if config.temperature == 0.0:
        return int(logits.argmax())
    logits = logits / config.temperature
    if 0 < config.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(config.top_k).values[-1], float("-inf"))
    probabilities = logits.softmax(0)
    if config.top_p < 1.0:
        ranked, order = probabilities.sort(descending=True)
        # Keep a token if those before it have not reached the sum yet: the likeliest one is always kept.
        total = ranked.cpu().cumsum(0).to(ranked.device)  # on a GPU it has no deterministic form
        dropped = order[total - ranked >= config.top_p]
        probabilities = probabilities.index_fill(0, dropped, 0.0)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def stream_text(tokenizer: Tokenizer, tokens: Iterator[int]) -> Iterator[str]:
    """Yields the text of `tokens` in pieces, as soon as it is certain: a character can take several tokens."""
    ids: list[int] = []
    shown = 0
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids)
        if text.endswith("\ufffd") and len(text) - shown < 4:
            continue  # the beginning of a character whose other bytes are still to come
        yield text[shown:]
        shown = len(text)
    yield tokenizer.decode(ids)[shown:]
