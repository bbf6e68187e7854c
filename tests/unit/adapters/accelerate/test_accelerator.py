"""A plain accelerate loop under `use_shardstack`: one reduction a step, and the numbers of one process."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from core.weights import WeightStream
from tests.unit._quick import needs, quick
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.adapters.accelerate._trainers import STRATEGIES, fresh_accelerate, pad, samples, some_and_others, tiny
from tests.unit.distributed._toys import recorded_collectives

pytestmark = needs("accelerate", "transformers")

EPS = 2.0**-23
UNITS = 3


class Loop:
    """The loop of accelerate's own examples: what is prepared, and a step."""

    def __init__(
        self, strategy: str | None, optimizer: Any = torch.optim.AdamW, reverse: bool = False, **options: Any
    ):
        from accelerate import Accelerator

        from core.adapters.accelerate import ShardstackPlugin, use_shardstack

        model = tiny("llama", tied=True)
        options = {"lr": 0.01} | options
        optimizer = optimizer(model.parameters(), **options)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        loader = DataLoader(samples(12), batch_size=1, collate_fn=pad, shuffle=False)
        accumulation = 6 // dist.get_world_size()
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=accumulation, step_scheduler_with_optimizer=False
        )
        if strategy is not None:
            use_shardstack(self.accelerator, ShardstackPlugin(strategy))
        if reverse:
            self.loader, self.scheduler, self.optimizer, self.model = self.accelerator.prepare(
                loader, scheduler, optimizer, model
            )
        else:
            self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
                model, optimizer, loader, scheduler
            )

    def epoch(self, clip: float | None = 0.3, by_value: float | None = None) -> tuple[list[float], list[int]]:
        """Returns the norms and the reductions of each step."""
        norms: list[float] = []
        reductions: list[int] = []
        with recorded_collectives("the gradients of") as begun:
            for batch in self.loader:
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(self.model(**batch).loss)
                    if self.accelerator.sync_gradients:
                        if by_value is not None:
                            self.accelerator.clip_grad_value_(self.model.parameters(), by_value)
                        if clip is not None:
                            norms.append(float(self.accelerator.clip_grad_norm_(self.model.parameters(), clip)))
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    if self.accelerator.sync_gradients:
                        self.scheduler.step()
                        reductions.append(len(begun))
                        begun.clear()
        return norms, reductions

    def weights(self) -> dict[str, Tensor]:
        state = self.accelerator.get_state_dict(self.model)
        names = [name for name, _ in self.accelerator.unwrap_model(self.model).named_parameters()]
        return {name: state[name].clone() for name in names if name in state}


def _loops(strategies: list[str | None], settings: dict[str, Any], by_value: float | None) -> list[Any]:
    found = []
    for strategy in strategies:
        with fresh_accelerate():
            loop = Loop(strategy, **settings)
            norms, reductions = loop.epoch(by_value=by_value)
            more, _ = loop.epoch(by_value=by_value)
            found.append((norms + more, reductions, loop.weights(), loop.scheduler.get_last_lr()))
    return found


@pytest.mark.parametrize(
    ("settings", "by_value"),
    [
        ({"optimizer": torch.optim.SGD, "lr": 0.1, "momentum": 0.9, "nesterov": True}, None),
        pytest.param({"optimizer": torch.optim.NAdam, "lr": 0.01, "eps": 1e-3}, None, marks=pytest.mark.long),
        pytest.param(
            {"optimizer": torch.optim.AdamW, "lr": 0.01, "eps": 1e-3, "reverse": True}, 0.02, marks=pytest.mark.long
        ),
    ],
    ids=["sgd", "nadam", "adamw, clipped by value, optimizer first"],
)
def test_a_loop_computes_what_it_does_in_one_process(settings, by_value):
    ((norms, _, weights, rates),) = run_distributed(_loops, 1, [None], settings, by_value)[0]
    # All in turn go through a Trainer, in test_trainer.
    strategies = STRATEGIES if by_value else ["optim", "optim_grads_params", "fsdp2"]
    of_ranks = run_distributed(_loops, 2, list(strategies), settings, by_value)
    for strategy, found in zip(strategies, of_ranks[0], strict=True):
        # Sums in another order, as in test_trainer; AdamW's eps of 1e-3 keeps it from enlarging that by more than 10.
        torch.testing.assert_close(found[0], norms, rtol=256 * EPS, atol=0.0)
        for name, weight in weights.items():
            torch.testing.assert_close(found[2][name], weight, rtol=0.0, atol=4 * 0.1 * 256 * EPS)
            assert torch.equal(found[2][name], of_ranks[0][0][2][name]), (strategy, name)
        assert found[1] == [UNITS if strategy in ("optim_grads_params", "fsdp2") else 1] * 2
        assert found[3] == rates


def _streamed(strategies: list[str]) -> list[tuple[bool, bool]]:
    """Returns whether a stream of the prepared model yields the weights that accelerate gathers, and them alone."""
    found = []
    for strategy in strategies:
        with fresh_accelerate():
            loop = Loop(strategy)
            loop.epoch()
            weights = loop.weights()
            received = {name: value.clone() for name, value in WeightStream(loop.model, "module", receivers=[0])}
            is_first = dist.get_rank() == 0
            equal = is_first and all(torch.equal(received[name], weight) for name, weight in weights.items())
            found.append((equal, all(value.is_meta != is_first for value in received.values())))
    return found


def test_a_stream_of_the_prepared_model_yields_its_weights():
    first, second = run_distributed(_streamed, 2, ["optim", "optim_grads_params", "fsdp2"])
    assert first == [(True, True)] * 3 and second == [(False, True)] * 3


@on_ranks(1)
def test_the_users_own_optimizer_and_scheduler_act() -> None:
    with fresh_accelerate(), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step")
        loop = Loop("optim_grads_params")
        loop.epoch()
        expected = loop.weights()
        state = loop.optimizer.state_dict()
    with fresh_accelerate():
        loop = Loop("optim_grads_params")
        prepared, loop.optimizer = loop.optimizer, _StepsByItself(loop.optimizer)
        loop.epoch()
        assert all(torch.equal(loop.weights()[name], weight) for name, weight in expected.items())
        prepared.load_state_dict(state)
        loop.scheduler.step()
        assert [group["lr"] for group in prepared.megatron.param_groups] == loop.scheduler.get_last_lr()
        with pytest.raises(Exception, match="step was given a closure"):
            prepared.step(lambda: 0.0)


class _StepsByItself:
    """Calls the step of the optimizer that the user has built."""

    def __init__(self, prepared: Any) -> None:
        self.prepared = prepared

    def step(self) -> None:
        if self.prepared.gradient_state.sync_gradients:
            self.prepared.optimizer.step()

    def zero_grad(self) -> None:
        self.prepared.zero_grad()


@on_ranks(2)
def test_an_optimizer_of_whole_matrices_works_on_replicas_alone() -> None:
    from core.base.errors import OptimizerError

    with fresh_accelerate():
        loop = Loop("no_shard", torch.optim.Adafactor)
        before = loop.weights()
        loop.epoch()
        assert loop.optimizer.megatron is None
        after = loop.weights()
        assert dist.get_rank() > 0 or any(not torch.equal(after[name], weight) for name, weight in before.items())
    for strategy in ("optim_grads", "fsdp2"):
        with fresh_accelerate(), pytest.raises(OptimizerError, match="Adafactor cannot update a part of a parameter"):
            Loop(strategy, torch.optim.Adafactor)


def _saved_states(folder: str, pairs: list[tuple[str, str]]) -> None:
    for number, (saving, loading) in enumerate(pairs):
        where = f"{folder}/{number}"
        with fresh_accelerate():
            loop = Loop(saving)
            loop.epoch()
            loop.accelerator.save_state(where)
            loop.epoch()
            expected, rates = loop.weights(), loop.scheduler.get_last_lr()
        with fresh_accelerate():
            loop = Loop(loading)
            with torch.no_grad(), loop.model.whole_parameters():
                for parameter in loop.model.parameters():
                    parameter.zero_()
            loop.accelerator.load_state(where)
            loop.epoch()
            assert loop.scheduler.get_last_lr() == rates
            found = loop.weights()
            assert all(torch.equal(found[name], weight) for name, weight in expected.items()), (saving, loading)


SOME = [("optim_grads_params", "optim_grads_params"), ("fsdp2", "fsdp2"), ("fsdp2", "optim_grads")]
OTHERS = [(strategy, strategy) for strategy in ("no_shard", "optim", "optim_grads")] + [("optim", "no_shard")]


@some_and_others("pairs", SOME, OTHERS)
def test_save_state_and_load_state_continue_bitwise(pairs, tmp_path):
    run_distributed(_saved_states, 2, str(tmp_path), pairs)
    run_distributed(_saved_states, 1, str(tmp_path / "one"), [("optim_grads_params", "fsdp2")])


@on_ranks(2)
def test_hooks_and_the_ways_to_save_a_model_work(tmp_path) -> None:
    for strategy in ("optim_grads_params", "fsdp2"):
        with fresh_accelerate():
            _save_in_every_way(f"{tmp_path}/{strategy}", Loop(strategy))


def _save_in_every_way(folder: str, loop: Loop) -> None:
    import transformers
    from accelerate import load_checkpoint_in_model

    seen: list[Any] = []
    loop.epoch()
    accelerator = loop.accelerator
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: seen.append(len(models)))
    accelerator.register_load_state_pre_hook(lambda models, folder: seen.append(models.pop()))
    accelerator.save_state(folder)
    loop.epoch()
    expected = loop.weights()
    accelerator.load_state(folder)
    assert seen == [1, loop.model]  # the hook has taken the model, and has loaded nothing
    found = loop.weights()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    accelerator.save_model(loop.model, f"{folder}/whole")
    accelerator.unwrap_model(loop.model).save_pretrained(
        f"{folder}/pretrained",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(loop.model),
    )
    accelerator.wait_for_everyone()
    plain = tiny("llama", tied=True)
    load_checkpoint_in_model(plain, f"{folder}/whole")
    for loaded in (plain, transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/pretrained")):
        assert all(torch.equal(dict(loaded.named_parameters())[name], w) for name, w in expected.items())


def _two_backwards(strategy: str) -> list[str]:
    """Returns for backwards without and with `no_sync` around the first what came of it."""
    from core.adapters.bridge.checkpoints import whole_state_dict
    from core.base.errors import ShardstackError

    found: list[Any] = []
    for uses_no_sync in (True, False):
        with fresh_accelerate():
            loop = Loop(strategy, torch.optim.SGD, lr=0.1)
            loop.accelerator.sync_gradients = True
            batches = [pad(samples(12)[index : index + 2]) for index in (dist.get_rank(), 6 + dist.get_rank())]
            try:
                with loop.accelerator.no_sync(loop.model) if uses_no_sync else nullcontext():
                    loop.accelerator.backward(loop.model(**batches[0]).loss)
                loop.accelerator.backward(loop.model(**batches[1]).loss)
                loop.optimizer.step()
                found.append(whole_state_dict(loop.model, keep=True))
            except ShardstackError as error:
                found.append(str(error))
    if isinstance(found[1], str):
        return [found[1]]
    # Where each is reduced by itself, sums over ranks and backwards are in another order; a step is 0.1 of them.
    return [name for name, weight in found[0].items() if (found[1][name] - weight).abs().max() > 0.1 * 64 * EPS]


@pytest.mark.parametrize(
    "strategy", quick(STRATEGIES, lambda strategy: strategy in ("no_shard", "optim_grads", "fsdp2"))
)
def test_two_backwards_of_a_step_count_both_or_raise(strategy):
    for found in run_distributed(_two_backwards, 2, strategy):
        assert not found or "inside no_sync" in found[0], found


@on_ranks(1)
def test_a_state_that_was_saved_without_is_refused(tmp_path) -> None:
    from core.base.errors import CheckpointError

    with fresh_accelerate():
        loop = Loop(None)
        loop.epoch()
        loop.accelerator.save_state(tmp_path)
    with fresh_accelerate():
        loop = Loop("optim")
        with pytest.raises(CheckpointError, match="was not saved by an accelerator of use_shardstack"):
            loop.accelerator.load_state(tmp_path)
