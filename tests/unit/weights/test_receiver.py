"""Rounds from two trainer ranks to two receivers, which have a group of their own: ranks 2 and 3 of the test."""

from __future__ import annotations

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core.base.errors import WeightsError
from core.weights import ParamMeta, WeightReceiver, WeightSender, WeightStream
from core.weights import messages as wire
from core.weights import receiver as receiving
from tests._forked import FORKED
from tests.unit._quick import quick
from tests.unit._spawn import run_distributed
from tests.unit.weights._live_bytes import LiveBytes
from tests.unit.weights._models import BUCKET, exported, gpt, optimizer_of, start, train, wrapped

TRAINERS, RECEIVERS, LIMIT_S = 2, 2, 20.0


def _roles(store: Path) -> tuple[Any, Any]:
    """Returns the trainers' group and the store that senders and receivers share."""
    group = dist.new_group(list(range(TRAINERS)))
    return group, dist.FileStore(str(store), -1)


def _stream(model: nn.Module, group: Any) -> WeightStream:
    return WeightStream(model, dtype=torch.bfloat16, receivers=[0], bucket_bytes=BUCKET, process_group=group)


def _model(kind: str, group: Any) -> nn.Module:
    return wrapped(kind, gpt(), group=group)


def _receiver(store: Any, limit_s: float = LIMIT_S, **more: Any) -> WeightReceiver:
    return WeightReceiver(store, dist.get_rank() - TRAINERS, RECEIVERS, limit_s=limit_s, **more)


def _are_equal(model: nn.Module, other: nn.Module, group: Any) -> bool:
    pairs = zip(WeightStream(model, process_group=group), WeightStream(other, process_group=group), strict=True)
    return all(torch.equal(a[1], b[1]) for a, b in pairs)


def _give_up_soon(sender: WeightSender) -> None:
    """Makes the next round of a sender fail soon if a receiver stays away."""
    if sender._link is not None:
        sender._link.limit = timedelta(seconds=1.5)


def _memory_of(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Returns a server's tensors for the weights of a model."""
    return {
        meta.name: torch.zeros(meta.shape, dtype=meta.dtype) for meta in WeightStream(model, dtype=dtype).metadata()
    }


def _rounds(kind: str, path: Path, steps: int) -> list[dict[str, torch.Tensor]]:
    """Returns the weights after each round: of the stream on rank 0, and what each receiver has."""
    start()
    group, store = _roles(path)
    if dist.get_rank() >= TRAINERS:
        into = _memory_of(gpt(), torch.bfloat16) if dist.get_rank() == TRAINERS else None
        receiver, taken = _receiver(store, into=into), []
        for version in range(steps):
            assert receiver.receive() == receiver.version == version
            taken.append({name: value.clone() for name, value in receiver.weights.items()})
            assert into is None or all(value is into[name] for name, value in receiver.weights.items())
        return taken
    model, undisturbed = _model(kind, group), _model(kind, group)
    optimizer, other = optimizer_of(model), optimizer_of(undisturbed)
    stream = _stream(model, group)
    sender, sent = WeightSender(stream, store, RECEIVERS, patches=True, limit_s=LIMIT_S), []
    for version in range(steps):
        (sender.send if version == 2 else sender.send_patch)(version)
        assert (sender.sent_bytes > 0) == sender.sends
        sent.append({name: value.clone() for name, value in stream})
        train(model, optimizer, version)
        train(undisturbed, other, version)
    assert _are_equal(model, undisturbed, group)
    return sent


@pytest.mark.parametrize("kind", ["zero3", "fsdp2"])
def test_receivers_have_the_streams_bits_and_training_its_own(kind: str, tmp_path: Path):
    results = run_distributed(_rounds, TRAINERS + RECEIVERS, kind, tmp_path / "store", 4)
    for received in results[TRAINERS:]:
        for expected, actual in zip(results[0], received, strict=True):
            assert expected.keys() == actual.keys()
            assert all(torch.equal(value, actual[name]) for name, value in expected.items())


def _takes_rounds(folder: Path, index: int, rounds: int) -> None:
    """A receiver in a process of its own."""
    receiver = WeightReceiver(dist.FileStore(str(folder / "store"), -1), index, RECEIVERS, limit_s=LIMIT_S)
    for _ in range(rounds):
        receiver.receive()
    torch.save(receiver.weights, folder / f"received{index}")


def _sends_rounds(kind: str, tp: int, instances: int, lora: bool, folder: Path) -> dict[str, torch.Tensor]:
    """Returns what the export writes after a step, or of a model with adapters the stream."""
    start(tp, instances)
    model = wrapped(kind, gpt(tensor_model_parallel_size=tp, lora=lora), instances=instances)
    stream, optimizer = WeightStream(model, receivers=[0], bucket_bytes=BUCKET), optimizer_of(model)
    sender = WeightSender(stream, dist.FileStore(str(folder / "store"), -1), RECEIVERS, limit_s=LIMIT_S)
    sender.send(0)
    train(model, optimizer, 0)
    sender.send(1)
    return dict(WeightStream(model)) if lora else exported(model, folder / "export")


@pytest.mark.parametrize(
    ("kind", "tp", "instances", "lora"),
    quick(
        [("fsdp2", 2, 1, False), ("zero3", 1, 2, False), ("fsdp2", 1, 2, False), ("zero1", 2, 1, True)],
        lambda case: case[0] == "zero3",
    ),
)
def test_receivers_have_the_files_of_four_trainers(kind, tp, instances, lora, tmp_path: Path):
    processes = [FORKED.Process(target=_takes_rounds, args=(tmp_path, index, 2)) for index in range(RECEIVERS)]
    for process in processes:
        process.start()
    expected = run_distributed(_sends_rounds, 4, kind, tp, instances, lora, tmp_path)[0]
    for index, process in enumerate(processes):
        process.join(LIMIT_S)
        received = torch.load(tmp_path / f"received{index}", weights_only=True)
        assert received.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in received.items())


def _fault(fault: str, path: Path) -> tuple[list[str], Any]:
    """Returns the messages of the errors of two rounds on this rank, and what a receiver has after a third."""
    start()
    group, store = _roles(path)
    rank, messages = dist.get_rank(), []

    def noting(run: Any) -> None:
        try:
            run()
            messages.append("")
        except WeightsError as error:
            assert "\n" not in str(error)
            messages.append(str(error))

    if rank >= TRAINERS:
        expected = [ParamMeta("w", torch.float32, (3,))] if fault == "shape" and rank == 3 else None
        receiver = _receiver(store, expected=expected)
        noting(receiver.receive)
        if fault == "missing" and rank == 3:
            receiver._state = "of a round that was not taken"
        damage = mock.patch.object(wire.hashlib, "sha256", lambda text: _Damaged())
        with damage if fault == "damaged" and rank == 3 else mock.patch.object(receiver, "device"):
            receiver.device = torch.device("cpu")
            noting(receiver.receive)
        noting(receiver.receive)
        return messages, {name: value.clone() for name, value in receiver.weights.items()}
    model = _model("zero3", group)
    optimizer, stream = optimizer_of(model), _stream(model, group)
    sender = WeightSender(stream, store, RECEIVERS, patches=True, limit_s=LIMIT_S)
    for version in range(3):
        if version == 1 and fault == "repeated":  # names the base that receivers had before this version
            sender._state = "of the round before"
        noting(lambda version=version: sender.send_patch(version))
        if version < 2:
            train(model, optimizer, version)
    return messages, dict(stream)


class _Damaged:
    """A hash of other bytes."""

    def update(self, data: Any) -> None:
        pass

    def hexdigest(self) -> str:
        return "0"


@pytest.mark.parametrize("fault", ["missing", "repeated", "damaged"])
def test_a_bad_patch_is_refused_and_the_next_round_mends_it(fault: str, tmp_path: Path):
    results = run_distributed(_fault, TRAINERS + RECEIVERS, fault, tmp_path / "store")
    for rank, (messages, _) in enumerate(results):
        assert messages[0] == messages[2] == "", (rank, messages)
    word = "are not those that were sent" if fault == "damaged" else "another base"
    assert word in results[0][0][1] and results[0][0][1] == results[1][0][1] and "receiver 2" in results[0][0][1]
    assert word in results[3][0][1]
    for _, weights in results[TRAINERS:]:
        assert all(torch.equal(value, weights[name]) for name, value in results[0][1].items())


def test_other_shapes_are_refused_before_the_first_byte(tmp_path: Path):
    results = run_distributed(_fault, TRAINERS + RECEIVERS, "shape", tmp_path / "store")
    assert "not known here" in results[0][0][0] and "receiver 2" in results[0][0][0]
    assert results[1][0][0] == results[0][0][0] and results[0][0][0] in results[2][0][0]
    assert "not known here" in results[3][0][0] and results[3][1] == {}


def _lost(path: Path) -> tuple[str, bool]:
    """Returns the error of a round whose second receiver is gone, and whether training went on with the same bits."""
    start()
    group, store = _roles(path)
    if dist.get_rank() >= TRAINERS:
        receiver = _receiver(store)
        receiver.receive()
        if dist.get_rank() == 3:
            return "", True
        with pytest.raises(WeightsError):
            receiver.receive()
        return "", receiver.version == 0
    model, undisturbed = _model("zero3", group), _model("zero3", group)
    optimizer, other = optimizer_of(model), optimizer_of(undisturbed)
    stream = _stream(model, group)
    sender = WeightSender(stream, store, RECEIVERS, limit_s=LIMIT_S)
    sender.send(0)
    _give_up_soon(sender)
    train(model, optimizer, 0)
    with pytest.raises(WeightsError) as caught:
        sender.send(1)
    with pytest.raises(WeightsError, match="were lost before"):
        sender.send(2)
    train(model, optimizer, 1)
    for step in range(2):
        train(undisturbed, other, step)
    return str(caught.value), _are_equal(model, undisturbed, group)


def test_a_lost_receiver_is_named_and_training_goes_on(tmp_path: Path):
    results = run_distributed(_lost, TRAINERS + RECEIVERS, tmp_path / "store")
    assert all(same for _, same in results)
    assert "rank 2" in results[0][0] and results[0][0] == results[1][0]


def _takes_until_killed(store: Path, index: int, pid_file: Path) -> None:
    """A receiver in a process of its own."""
    pid_file.write_text(str(os.getpid()))
    receiver = WeightReceiver(dist.FileStore(str(store), -1), index, RECEIVERS, limit_s=LIMIT_S)
    while receiver.receive() is not None:
        pass


def _sends_to_killed(path: Path, pid_file: Path) -> tuple[str, bool]:
    """Returns the error of a round in whose middle a receiver is killed, and whether training kept its bits."""
    start()
    store = dist.FileStore(str(path), -1)
    model, undisturbed = _model("zero3", dist.group.WORLD), _model("zero3", dist.group.WORLD)
    optimizer, other = optimizer_of(model), optimizer_of(undisturbed)
    stream = _stream(model, dist.group.WORLD)
    sender = WeightSender(stream, store, RECEIVERS, limit_s=LIMIT_S)
    sender.send(0)
    _give_up_soon(sender)
    train(model, optimizer, 0)
    inner, buckets = sender._send_bucket, []

    def send_bucket(*args: Any) -> None:
        buckets.append(args)
        if sender.sends and len(buckets) == 2:
            os.kill(int(pid_file.read_text()), signal.SIGKILL)
        inner(*args)

    with (
        mock.patch.object(sender, "_send_bucket", send_bucket),
        mock.patch("core.weights.sender._ANSWER_S", 1.0),
        pytest.raises(WeightsError) as caught,
    ):
        sender.send(1)
    train(model, optimizer, 1)
    for step in range(2):
        train(undisturbed, other, step)
    return str(caught.value), _are_equal(model, undisturbed, dist.group.WORLD)


def test_a_killed_receiver_is_named_and_training_goes_on(tmp_path: Path):
    store, pids = tmp_path / "store", [tmp_path / f"pid{index}" for index in range(RECEIVERS)]
    receivers = [
        FORKED.Process(target=_takes_until_killed, args=(store, index, pid), daemon=True)
        for index, pid in enumerate(pids)
    ]
    for receiver in receivers:
        receiver.start()
    for message, same in run_distributed(_sends_to_killed, TRAINERS, store, pids[1]):
        assert re.search(r"receivers of weights did not .* within the limit: rank 2;", message), message
        assert same
    for receiver in receivers:
        receiver.kill()
        receiver.join()


def _live(path: Path, bucket: int) -> tuple[int, int]:
    """Returns the most bytes that a rank holds in a round on top of its state, and the bound: of a receiver with the
    version that comes."""
    start()
    group, store = _roles(path)
    if dist.get_rank() >= TRAINERS:
        is_in_place = dist.get_rank() == TRAINERS
        receiver = _receiver(store, into=_memory_of(gpt(num_layers=4)) if is_in_place else None)
        with LiveBytes() as live:
            receiver.receive()
        return live.peak, 2 * bucket + (0 if is_in_place else sum(v.nbytes for v in receiver.weights.values()))
    model = wrapped("fsdp2", gpt(num_layers=4), group=group)
    stream = WeightStream(model, receivers=[0], bucket_bytes=bucket, process_group=group)
    sender = WeightSender(stream, store, RECEIVERS, limit_s=LIMIT_S)
    assert stream.owners
    largest = max(view.numel() * view.element_size() for view in stream.views.values())
    with LiveBytes() as live:
        sender.send(0)
    return live.peak, 2 * bucket + largest


def test_a_round_holds_two_buckets_and_a_tensor(tmp_path: Path):
    for peak, bound in run_distributed(_live, TRAINERS + RECEIVERS, tmp_path / "store", 10000):
        assert peak <= bound


def _sleeps(path: Path, pause_s: float) -> int:
    start()
    group, store = _roles(path)
    if dist.get_rank() >= TRAINERS:
        receiver = _receiver(store, 60.0 + pause_s)
        time.sleep(pause_s * (dist.get_rank() - TRAINERS))
        return receiver.receive()
    WeightSender(_stream(_model("fsdp2", group), group), store, RECEIVERS, limit_s=60.0 + pause_s).send(7)
    return 7


@pytest.mark.parametrize("pause_s", quick([0.5, 30.0], lambda pause_s: pause_s < 1.0))
def test_a_slow_receiver_is_no_error(pause_s: float, tmp_path: Path):
    assert run_distributed(_sleeps, TRAINERS + RECEIVERS, tmp_path / "store", pause_s) == [7] * 4


def _hash_of(flat: torch.Tensor) -> str:
    digest = receiving.new_hash({"kind": "full", "version": 0, "base": ""})
    receiving.update_hash(digest, flat)
    return digest.hexdigest()


def test_hashes_see_flipped_bits_and_moved_blocks():
    flat = torch.randint(0, 256, (100_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert _hash_of(flat) == _hash_of(torch.cat([flat[:3], flat])[3:])  # in memory where no word begins
    flipped = [flat.clone() for _ in range(3)]
    for place, changed in zip((0, 60_000, 99_999), flipped, strict=True):
        changed[place] ^= 4
    moved = torch.cat([flat[32768:65536], flat[:32768], flat[65536:]])
    assert len({_hash_of(flat), _hash_of(moved), *map(_hash_of, flipped)}) == 5  # no two are equal


def test_an_address_without_a_port_is_refused():
    with pytest.raises(WeightsError, match="give host:port"):
        WeightReceiver("localhost", 0, 1)
    with pytest.raises(WeightsError, match="0 to 0"):
        WeightReceiver("localhost:1", 1, 1)


def test_a_failed_round_into_given_memory_leaves_no_version():
    store, kept = dist.HashStore(), {"w": torch.zeros(3)}
    with ThreadPoolExecutor(1) as pool:
        sender = pool.submit(receiving.Link, store, 0, 1, LIMIT_S, "gloo")
        receiver = WeightReceiver(store, 0, 1, into=kept, limit_s=LIMIT_S)
    metas = receiving.as_json([ParamMeta("w", torch.float32, (3,))])
    for number, end in enumerate((None, "a lost rank"), 1):
        header = {"kind": "full", "version": number, "base": "", "tensors": metas}
        digest, sent = receiving.new_hash(header), torch.full((3,), float(number))
        receiving.update_hash(digest, sent)
        sender.result().write(f"round/{number}/header", header)
        sender.result().write(f"round/{number}/bucket/0", metas)
        sender.result().write(f"round/{number}/bucket/1", {"failure": end} if end else digest.hexdigest())
        sender.result().broadcast(sent)
        if end is None:
            assert receiver.receive() == 1 and receiver.weights["w"] is kept["w"]
    with pytest.raises(WeightsError, match=r"a lost rank.*; send all of them again"):
        receiver.receive()
    assert receiver.version is None and receiver.weights == {} and kept["w"].tolist() == [2.0] * 3


def test_rounds_and_patches_go_into_a_models_parameters():
    store, model, server = dist.HashStore(), nn.Linear(3, 2), nn.Linear(3, 2)
    with ThreadPoolExecutor(1) as pool:
        sender = pool.submit(WeightSender, WeightStream(model, "module"), store, 1, patches=True, limit_s=LIMIT_S)
        receiver = WeightReceiver(store, 0, 1, into=dict(server.named_parameters()), limit_s=LIMIT_S)
        for version in range(2):
            model.weight.data[version] += 1
            sent = pool.submit(sender.result().send_patch, version)
            assert receiver.receive() == version and sent.result() is None
            assert torch.equal(server.weight, model.weight) and torch.equal(server.bias, model.bias)


def test_patches_arrive_on_the_device_of_given_memory():
    with mock.patch.object(receiving, "Link"):
        receiver = WeightReceiver("localhost:1", 0, 1, into={"w": torch.empty(2, device="meta")})
    assert receiver.device.type == "meta"


def test_memory_that_is_not_contiguous_is_refused():
    with pytest.raises(WeightsError, match="w of into is not contiguous"):
        WeightReceiver("localhost:1", 0, 1, into={"w": torch.zeros(2, 3).T})
