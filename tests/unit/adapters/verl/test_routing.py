"""Routing replay in verl's steps: recorded log probabilities and a step that replays itself have the bits of one that
does not, under every strategy, and what a server sends is laid out as the routers have it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from core.base.errors import ConfigError, DataError
from tests.unit._quick import needs
from tests.unit._spawn import run_distributed
from tests.unit.adapters.verl import _workers as w

pytestmark = needs("verl")

EXPERTS, TAKEN, LAYERS = 4, 2, 2
MIXTURE = {"num_experts": EXPERTS, "num_experts_per_tok": TAKEN, "moe_intermediate_size": 12, "norm_topk_prob": True}
DYNAMIC = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 16, "infer_max_token_len_per_gpu": 16}


def _mode(mode: str) -> dict[str, Any]:
    w._use_cpu()
    from verl.workers.config import EngineRouterReplayConfig

    return {"router_replay": EngineRouterReplayConfig(mode=mode)}


def _with_routes(data: Any, routes: list[Tensor]) -> Any:
    data["routed_experts"] = torch.nested.as_nested_tensor(routes, layout=torch.jagged)
    return data


def _inferred(worker: Any, step: int) -> tuple[Tensor, Any]:
    from verl.utils import tensordict_utils as tu

    output = worker.infer_batch(w.batch(step, compute_loss=False))
    return tu.get(output, "log_probs").values(), tu.get(output, "routed_experts")


def _replayed(path: str, cases: list[tuple[str, dict[str, Any]]]) -> None:
    with w.verl_environment():
        for strategy, fields in cases:
            plain = w.worker_of(path, strategy, **fields)
            worker = w.worker_of(path, strategy, **fields | _mode("R2"))
            for step in range(2):
                chances, routes = _inferred(worker, step)
                own, none = _inferred(plain, step)
                assert none is None and torch.equal(chances, own)
                lengths = w.batch(step)["input_ids"].offsets().diff().tolist()
                assert [tuple(rows.shape) for rows in routes.unbind()] == [(n, LAYERS, TAKEN) for n in lengths]
                metrics = worker.train_batch(_with_routes(w.batch(step), list(routes.unbind())))["metrics"]
                assert [(metrics["loss"], metrics["grad_norm"])] == w.train(plain, [step]), strategy
            weights = w.weights(plain)
            assert all(torch.equal(tensor, weights[name]) for name, tensor in w.weights(worker).items()), strategy


def test_a_step_that_replays_itself_has_its_own_bits(tmp_path):
    path = w.save_model(tmp_path / "model", "qwen3_moe", **MIXTURE)
    checkpointed = {"model": {"enable_gradient_checkpointing": True}}
    cases = [(strategy, {}) for strategy in ("no_shard", "optim_grads", "optim_grads_params", "fsdp2")]
    cases += [
        ("optim_grads_params", DYNAMIC | checkpointed),
        ("optim", DYNAMIC | {"pad_to_length": True, "pad_to_length_bucket": 16}),
    ]
    run_distributed(_replayed, 2, path, cases)


def _over_split_sequences(path: str) -> None:
    fields = {"ulysses_sequence_parallel_size": 2} | DYNAMIC
    model = {"override_config": {"attn_implementation": "flash_attention_2"}}
    with w.verl_environment(), w.stub_of_flash_attention():
        plain = w.worker_of(path, "optim_grads_params", model=model, **fields)
        worker = w.worker_of(path, "optim_grads_params", model=model, **fields | _mode("R2"))
        routes: list[Any] = [None]
        if (output := worker.infer_batch(w.batch(0, 0, 1, compute_loss=False))) is not None:
            routes = [list(output["routed_experts"].unbind())]
            assert [len(rows) for rows in routes[0]] == w.batch(0, 0, 1)["input_ids"].offsets().diff().tolist()
        dist.broadcast_object_list(routes, 0)

        def losses_of(routes: list[Tensor]) -> list[float]:
            done = [worker.train_batch(_with_routes(w.batch(0, 0, 1), routes)), plain.train_batch(w.batch(0, 0, 1))]
            return [each["metrics"]["loss"] for each in done if each is not None]  # of the first rank alone

        assert len(set(losses_of(routes[0]))) <= 1
        weights = w.weights(plain)
        assert all(torch.equal(tensor, weights[name]) for name, tensor in w.weights(worker).items())
        assert len(set(losses_of([rows.roll(1, 0) for rows in routes[0]]))) != 1, "nothing was replayed"


def test_split_sequences_are_recorded_and_replayed(tmp_path):
    run_distributed(_over_split_sequences, 2, w.save_model(tmp_path / "model", "qwen3_moe", **MIXTURE))


def _of_a_server(path: str) -> None:
    """Replays experts that no router would choose, which a run cannot have had by itself."""
    with w.verl_environment():
        worker = w.worker_of(path, "optim_grads_params", **_mode("R3") | DYNAMIC)
        lengths = w.batch(0)["input_ids"].offsets().diff().tolist()
        generator = torch.Generator().manual_seed(3)
        routes = [torch.rand(n, LAYERS, EXPERTS, generator=generator).argsort()[..., :TAKEN].short() for n in lengths]
        for rows in routes:
            rows[-1] = 0  # of the last token a server knows no experts, and verl fills up with zeros
        seen: list[Tensor] = []
        for layer in worker.engine.module.module.model.layers:
            layer.mlp.gate.register_forward_hook(lambda module, args, output: seen.append(output[2].clone()))
        worker.train_batch(_with_routes(w.batch(0), routes))
        taken = torch.cat([torch.stack(seen[i : i + LAYERS], 1) for i in range(0, len(seen), LAYERS)])
        rows = sorted(routes_of.tolist() for routes_of in torch.cat([rows[:-1] for rows in routes]))
        assert all(len(set(experts)) == TAKEN for token in taken.tolist() for experts in token)
        left = taken.tolist()
        for token in rows:
            left.remove(token)  # raises if no token of the step has taken these
        assert len(left) == len(lengths)


def test_what_a_server_chose_is_taken(tmp_path):
    run_distributed(_of_a_server, 2, w.save_model(tmp_path / "model", "qwen3_moe", **MIXTURE))


def _dense_layers(path: str) -> None:
    with w.verl_environment():
        worker = w.worker_of(path, "fsdp2", **_mode("R3"))
        rows = torch.zeros(5, LAYERS, TAKEN, dtype=torch.int16)
        rows[:4, 1] = torch.tensor([3, 1])
        assert worker.engine._rows(rows).tolist() == [[[3, 1]]] * 4 + [[[-1, -1]]]
        worker.train_batch(
            _with_routes(w.batch(0), [rows[:1].expand(n, -1, -1) for n in w.batch(0)["input_ids"].offsets().diff()])
        )


def test_layers_without_experts_are_left_out(tmp_path):
    fields = MIXTURE | {"mlp_only_layers": [0]}
    run_distributed(_dense_layers, 2, w.save_model(tmp_path / "model", "qwen3_moe", **fields))


def _reject(path: str) -> None:
    with w.verl_environment():
        for mode, message in (
            ("R3", "rollout.enable_rollout_routing_replay brings"),
            ("R2", "compute_log_prob brings"),
        ):
            with pytest.raises(DataError, match=f"'{mode}', and a batch has no routed_experts; {message}"):
                w.train(w.worker_of(path, "optim", **_mode(mode)), range(1))
        reference = w.worker_of(path, "optim", forward_only=True, **_mode("R3"))
        assert _inferred(reference, 0)[1] is None
        with pytest.raises(ConfigError, match="'R2', which takes packed sequences; set use_remove_padding"):
            w.worker_of(path, "optim", **_mode("R2"), model={"use_remove_padding": False})
        with pytest.raises(
            ConfigError, match="size is 2, and verl exchanges heads in flash attention alone, not in 'e"
        ):
            w.worker_of(path, "optim", ulysses_sequence_parallel_size=2)


def test_what_cannot_be_replayed_is_one_line(tmp_path):
    run_distributed(_reject, 2, w.save_model(tmp_path / "model", "qwen3_moe", **MIXTURE))
