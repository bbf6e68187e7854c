"""Memory that wrappers release between two phases, and bring back: bits, bytes, and what uses it in between."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core import parallel_state
from core.base.errors import ShardstackError
from core.base.memory_categories import optimizer_tensors
from core.comm import streams
from core.dist_checkpointing import load_training, local_tensor, model_state_dict, save_training
from core.distributed import (
    DistributedDataParallelConfig,
    FullyShardedDataParallelConfig,
    TorchFullyShardedDataParallelConfig,
    _BaseDataParallel,
    finalize_model_grads,
    released_memory,
    wrap_model,
)
from core.optimizer import OptimizerConfig, get_megatron_optimizer, shard_optimizer
from core.optimizer.averaged_weights import AveragedWeights
from core.weights import WeightStream
from tests.unit._on_gpu import needs_gpu, one_rank_on_a_gpu
from tests.unit._spawn import on_ranks, run_distributed

WIDTH = 96
CONFIGS: dict[str, DistributedDataParallelConfig] = {
    "replicas": DistributedDataParallelConfig(),
    "zero1": DistributedDataParallelConfig(
        data_parallel_sharding_strategy="optim", overlap_grad_reduce=True, overlap_param_gather=True
    ),
    "zero2": DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads"),
    "zero3": FullyShardedDataParallelConfig(),
    "fsdp2": TorchFullyShardedDataParallelConfig(),
    "zero1_hybrid": DistributedDataParallelConfig(
        data_parallel_sharding_strategy="optim", num_distributed_optimizer_instances=2
    ),
    "zero3_hybrid": FullyShardedDataParallelConfig(num_distributed_optimizer_instances=2),
    "fsdp2_hybrid": TorchFullyShardedDataParallelConfig(num_distributed_optimizer_instances=2),
    "fsdp2_replicated": TorchFullyShardedDataParallelConfig(replicated=("head.*",)),
}
ONE_OF_EACH = ("replicas", "zero1", "zero2", "zero3", "fsdp2")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """A stranger's: buffers that forwards write, a frozen weight, one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head, self.frozen = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(self.head(x))
        return x @ self.frozen


def _build(kind: str, dtype: torch.dtype, of_torch: bool = False) -> tuple[_BaseDataParallel, Any]:
    parallel_state.initialize_model_parallel(
        num_distributed_optimizer_instances=CONFIGS[kind].num_distributed_optimizer_instances
    )
    torch.manual_seed(3)
    model = wrap_model(Model().to(dtype), None, copy.deepcopy(CONFIGS[kind]), sub_modules_to_wrap=[Block])
    if of_torch:
        return model, shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01), [model])
    return model, get_megatron_optimizer(OptimizerConfig(lr=0.01, clip_grad=1.0), [model])


def _step(model: _BaseDataParallel, optimizer: Any, number: int) -> None:
    model.zero_grad_buffer()
    draws = torch.Generator().manual_seed(10 * number + dist.get_rank())
    x = torch.randn(8, WIDTH, generator=draws).to(next(model.module.buffers()).dtype)
    with model.no_sync():
        model(x).square().mean().backward()
    model(x + 1).square().mean().backward()
    finalize_model_grads([model])
    optimizer.step()


def _evaluate(model: _BaseDataParallel, dtype: torch.dtype) -> None:
    model.eval()
    with torch.no_grad():
        model(torch.zeros(2, WIDTH, dtype=dtype))
    model.train()


def _whole(model: _BaseDataParallel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in WeightStream(model)}


def _live_bytes() -> int:
    """Returns the bytes of the storages of all tensors that Python can reach, but gloo's scratch in uint8."""
    gc.collect()
    tensors = [_local(one) for one in gc.get_objects() if isinstance(one, Tensor)]
    tensors = [one for one in tensors if type(one).__torch_dispatch__ is Tensor.__torch_dispatch__]  # others have none
    with torch._C.DisableTorchFunctionSubclass():  # of hidden parameters too
        storages = {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors if t.dtype != torch.uint8)}
    return sum(storages.values())


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor


def _sleeps(kind: str, dtype: torch.dtype, folder: str) -> dict[str, Any]:
    before_all = _live_bytes()
    model, optimizer = _build(kind, dtype)
    average = AveragedWeights(optimizer, decay=0.9)
    _step(model, optimizer, 0)
    model.zero_grad_buffer()
    held = _live_bytes() - before_all
    freed = model.release()
    left = _live_bytes() - before_all
    model.restore()
    _step(model, optimizer, 1)
    gradients = {name: model.local_gradient(p).clone() for name, p in model.named_parameters() if p.requires_grad}
    model.release("gradients", "optimizer", folder=folder)
    model.release("model", "optimizer")
    model.restore("model")
    _evaluate(model, dtype)  # what is awake works
    model.restore("gradients", "optimizer")
    problems = [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and not torch.equal(model.local_gradient(p), gradients[name])
    ]
    model.release("optimizer")
    model.restore()
    _step(model, optimizer, 2)
    optimizer.zero_grad()
    model.release("model")
    model.restore()
    _step(model, optimizer, 3)
    with average.swapped():
        averages = _whole(model)
    return {
        "share": left / held,
        "freed": freed,
        "problems": problems,
        "weights": _whole(model),
        "averages": averages,
        "files": list(Path(folder).iterdir()),
    }


def _never_sleeps(kind: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, optimizer = _build(kind, dtype)
    average = AveragedWeights(optimizer, decay=0.9)
    for number in range(4):
        _step(model, optimizer, number)
        if number == 1:
            _evaluate(model, dtype)
    with average.swapped():
        averages = _whole(model)
    return _whole(model), averages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", CONFIGS)
def test_bits_come_back_and_bytes_go(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    weights, averages = run_distributed(_never_sleeps, 2, kind, dtype)[0]
    for rank in run_distributed(_sleeps, 2, kind, dtype, str(tmp_path)):
        assert rank["problems"] == []
        assert rank["share"] <= 0.02 and rank["freed"] > 0
        assert rank["files"] == []  # the file has no name
        for name, tensor in weights.items():
            assert torch.equal(rank["weights"][name], tensor), name
            assert torch.equal(rank["averages"][name], averages[name]), name


def _uses(kind: str) -> dict[str, str]:
    """Returns what each use says while everything is released, by its name."""
    model, optimizer = _build(kind, torch.bfloat16)
    average = AveragedWeights(optimizer)
    _step(model, optimizer, 0)
    x = torch.zeros(2, WIDTH, dtype=torch.bfloat16)
    parameter, block = model.module.head.weight, model.module.blocks[0]
    late = model(x).sum()
    stream, gradients = WeightStream(model), [p.grad for p in model.parameters()]
    model.release()
    model.restore()
    # Before the late backward, which from torch 2.15 on begins before it raises, and so ends the step's gradients.
    same = all(before is p.grad for before, p in zip(gradients, model.parameters(), strict=True))
    model.release()
    uses: dict[str, Callable[[], Any]] = {
        "forward": lambda: model(x),
        "the module's forward": lambda: model.module(x),
        "a layer's forward": lambda: block(x),
        "a layer's method": lambda: model.module.blocks[0].norm.running_mean + 1,
        "a late backward": late.backward,
        "a parameter": lambda: parameter + 1,
        "a parameter's copy": lambda: parameter.detach().clone(),
        "whole_parameters": lambda: model.whole_parameters().__enter__(),
        "broadcast_params": model.broadcast_params,
        "state_dict": lambda: [tensor + 1 for tensor in model.state_dict().values()],
        "pickle": lambda: pickle.dumps(model.module.state_dict()),
        "sharded_state_dict": lambda: [local_tensor(t) + 1 for t in model_state_dict(model).values()],
        "load_state_dict": lambda: model.load_state_dict(Model().state_dict()),
        "stream": lambda: list(stream),
        "a new stream": lambda: list(WeightStream(model)),
        "finalize_model_grads": lambda: finalize_model_grads([model]),
        "zero_grad_buffer": model.zero_grad_buffer,
        "zero_grad": optimizer.zero_grad,
        "step": optimizer.step,
        "state_tensors": optimizer.state_tensors,
        "optimizer.state_dict": optimizer.state_dict,
        "optimizer.state": lambda: [tensor + 1 for tensor in optimizer_tensors(optimizer.optimizer)],
        "swapped": lambda: average.swapped().__enter__(),
    }
    for number, gradient in enumerate(gradient for gradient in gradients if gradient is not None):
        uses[f"gradient {number}"] = partial(torch.add, gradient, 1)
    said = {}
    for name, use in uses.items():
        try:
            use()
            said[name] = "nothing"
        except Exception as error:
            said[name] = str(error)
    model.restore()
    said["gradients that came back"] = "the same" if same else "others"
    _step(model, optimizer, 1)
    said["weights"] = repr({name: tensor.double().sum().item() for name, tensor in _whole(model).items()})
    return said


def _is_used_between_steps(kind: str) -> str:
    model, optimizer = _build(kind, torch.bfloat16)
    AveragedWeights(optimizer)
    for number in range(2):
        _step(model, optimizer, number)
        if not number:
            model(torch.zeros(2, WIDTH, dtype=torch.bfloat16))
    return repr({name: tensor.double().sum().item() for name, tensor in _whole(model).items()})


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_any_use_of_what_is_released_raises(kind: str) -> None:
    weights = run_distributed(_is_used_between_steps, 2, kind)[0]
    for said in run_distributed(_uses, 2, kind):
        assert said.pop("gradients that came back") == "the same"
        assert said.pop("weights") == weights
        for name, message in said.items():
            late = name == "a late backward" and "modified by an inplace operation" in message  # torch's own check
            assert late or "restore() first" in message, (name, message)


def _refusals(folder: str) -> list[str]:
    model, optimizer = _build("zero3", torch.float32)
    said = []

    def note(call: Callable[[], Any]) -> None:
        try:
            call()
            said.append("nothing")
        except ShardstackError as error:
            said.append(str(error))

    note(lambda: model.release("weights"))
    note(lambda: model.restore("state"))
    note(lambda: model.release("model", folder=folder + "/missing"))
    model(torch.zeros(2, WIDTH)).sum().backward()  # works: nothing was released
    note(lambda: model.release("gradients"))
    model.zero_grad_buffer()
    assert model.release("model") and model.release("model") == 0
    model.restore("optimizer")  # is not released
    model.restore()
    _step(model, optimizer, 0)
    registers = wrap_model(Model(), None, DistributedDataParallelConfig())
    object.__setattr__(registers.plan.settings, "nccl_ub", True)
    note(registers.release)
    return said


def test_what_cannot_be_released_is_one_line(tmp_path: Path) -> None:
    for said in run_distributed(_refusals, 2, str(tmp_path)):
        assert said[0].startswith("release() was given 'weights'; ") and "model" in said[0]
        assert said[1].startswith("restore() was given 'state'; ")
        assert said[2].startswith(f"release() found no room in {tmp_path}/missing: No such file or directory")
        assert "in mid-step" in said[3] and "nccl_ub" in said[4] and len(said) == 5


def _torchs(kind: str, releases: bool) -> tuple[int, str, list[float]]:
    """An optimizer of torch over replicas, and one that `shard_optimizer` has taken."""
    model, optimizer = _build(kind, torch.float32, of_torch=kind != "replicas")
    if kind == "replicas":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    _step(model, optimizer, 0)
    freed, said = model.release("optimizer") if releases else 0, ""
    if releases:
        try:
            optimizer.step()
        except ShardstackError as error:
            said = str(error)
        model.restore()
    _step(model, optimizer, 1)
    return freed, said, [tensor.double().sum().item() for tensor in _whole(model).values()]


@pytest.mark.parametrize("kind", ["replicas", "zero3", "fsdp2"])
def test_optimizers_of_torch_are_released(kind: str) -> None:
    _, _, expected = run_distributed(_torchs, 2, kind, False)[0]
    trained = sum(p.numel() for p in Model().parameters() if p.requires_grad)
    for freed, said, sums in run_distributed(_torchs, 2, kind, True):
        assert freed >= 2 * 4 * trained // (1 if kind == "replicas" else 2) * 0.97  # shards differ by a row
        assert "restore() first" in said
        assert sums == expected


def _finds_no_memory(kind: str) -> list[float]:
    """The device's memory is full in the middle of `restore`, which is called again."""
    model, optimizer = _build(kind, torch.bfloat16)
    _step(model, optimizer, 0)
    model.release()
    for owner, name in ((released_memory._Storage, "restore"), (type(model.engine), "allocate_gathered")):
        own, calls = getattr(owner, name), []

        def fails_once(self: Any, own: Callable[..., None] = own, calls: list[int] = calls) -> None:
            calls.append(1)
            if len(calls) == 2 or own.__name__ == "allocate_gathered":
                raise RuntimeError("out of memory")
            own(self)

        with mock.patch.object(owner, name, fails_once), pytest.raises(RuntimeError, match="out of memory"):
            model.restore()
        with pytest.raises(ShardstackError, match=r"restore\(\) first"):
            optimizer.step()
    model.restore()
    _step(model, optimizer, 1)
    return [tensor.double().sum().item() for tensor in _whole(model).values()]


@pytest.mark.parametrize("kind", ["replicas", "zero3", "fsdp2"])
def test_restore_can_be_called_again(kind: str) -> None:
    expected = run_distributed(_steps_in_bf16, 2, kind)[0]
    assert run_distributed(_finds_no_memory, 2, kind) == [expected, expected]


def _steps_and_evaluates(kind: str) -> list[float]:
    model, optimizer = _build(kind, torch.bfloat16)
    _step(model, optimizer, 0)
    _evaluate(model, torch.bfloat16)
    _step(model, optimizer, 1)
    return [tensor.double().sum().item() for tensor in _whole(model).values()]


class _Stop(BaseException):
    pass


def _is_interrupted(kind: str) -> list[float]:
    """`release` ends in the middle, before anything was freed, and afterwards."""
    model, optimizer = _build(kind, torch.bfloat16)
    _step(model, optimizer, 0)
    save, saves = released_memory._Storage.save, []

    def stops(self: Any, folder: str | None) -> None:
        saves.append(save(self, folder))
        if len(saves) == 3:
            raise _Stop

    with mock.patch.object(released_memory._Storage, "save", stops), pytest.raises(_Stop):
        model.release()
    _evaluate(model, torch.bfloat16)  # nothing was released
    hidden = released_memory.ReleasedMemory._visible

    def stops_once(self: Any, part: str) -> Any:
        yield from hidden(self, part)
        raise _Stop

    with mock.patch.object(released_memory.ReleasedMemory, "_visible", stops_once), pytest.raises(_Stop):
        model.release()
    model.restore()
    _step(model, optimizer, 1)
    return [tensor.double().sum().item() for tensor in _whole(model).values()]


@pytest.mark.parametrize("kind", ["zero3", "fsdp2"])
def test_an_interrupted_release_can_be_restored(kind: str) -> None:
    expected = run_distributed(_steps_and_evaluates, 2, kind)[0]
    assert run_distributed(_is_interrupted, 2, kind) == [expected, expected]


def _chunks(kind: str, of_torch: bool, releases: bool) -> list[Tensor]:
    """Two models, whose parameters one optimizer updates, sleep one after the other."""
    parallel_state.initialize_model_parallel()
    torch.manual_seed(3)
    models = [wrap_model(Model(), None, copy.deepcopy(CONFIGS[kind]), sub_modules_to_wrap=[Block]) for _ in range(2)]
    parameters = [p for model in models for p in model.parameters() if p.requires_grad]
    if of_torch:
        optimizer: Any = torch.optim.AdamW(parameters, lr=0.01)
    else:
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.01, clip_grad=1.0), models)
    for number in range(4):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
        for model in models:
            model.zero_grad_buffer()
        models[1](models[0](x)).square().mean().backward()
        finalize_model_grads(models)
        optimizer.step()
        if releases:
            order = models if number % 2 else models[::-1]
            freed = [model.release(*[("optimizer",), ()][number // 2]) for model in models]
            assert min(freed) > 0.9 * max(freed)
            for model in order:
                with pytest.raises(ShardstackError, match=r"restore\(\) first"):
                    optimizer.step()
                model.restore()
    return [tensor for model in models for tensor in _whole(model).values()]


@pytest.mark.parametrize(
    ("kind", "of_torch"), [("replicas", True), ("replicas", False), ("zero3", False), ("fsdp2", False)]
)
def test_models_with_one_optimizer_sleep(kind: str, of_torch: bool) -> None:
    expected = run_distributed(_chunks, 2, kind, of_torch, False)[0]
    for rank in run_distributed(_chunks, 2, kind, of_torch, True):
        assert all(map(torch.equal, rank, expected))


def _sleeps_inside_of_whole_parameters() -> tuple[str, list[float], list[float]]:
    model, optimizer = _build("zero3", torch.float32)
    _step(model, optimizer, 0)
    before, said = [tensor.double().sum().item() for tensor in _whole(model).values()], ""
    with model.whole_parameters():
        try:
            model.release()
        except ShardstackError as error:
            said = str(error)
    return said, before, [tensor.double().sum().item() for tensor in _whole(model).values()]


def test_shards_whose_copies_are_shown_stay() -> None:
    for said, before, after in run_distributed(_sleeps_inside_of_whole_parameters, 2):
        assert "inside whole_parameters()" in said and before == after


class _InHalves(Tensor):
    """State as quantized optimizers keep it: a tensor without memory of its own, made of two."""

    @staticmethod
    def __new__(cls, first: Tensor, second: Tensor) -> Tensor:
        made = Tensor._make_wrapper_subclass(cls, (2 * len(first),), dtype=first.dtype, device=first.device)
        made.first, made.second = first, second
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["first", "second"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *unused: Any) -> Tensor:
        return _InHalves(inner["first"], inner["second"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


@on_ranks(1)
def test_state_inside_of_other_tensors_sleeps() -> None:
    model, _ = _build("replicas", torch.float32)
    shared = torch.ones(50).share_memory_()
    model.module.register_buffer("shared", shared)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    _step(model, optimizer, 0)
    parts = [torch.arange(300.0), torch.arange(300.0)]
    kept = [torch.arange(400.0), {"deeper": torch.arange(500.0)}]
    optimizer.state[model.module.head.weight] |= {"halves": _InHalves(*parts), "list": kept}
    model.release()
    for hidden in (*parts, kept[0], kept[1]["deeper"]):
        with pytest.raises(ShardstackError):
            hidden + 1
    assert torch.equal(shared, torch.ones(50))
    model.restore()
    assert torch.equal(parts[0], torch.arange(300.0)) and torch.equal(kept[1]["deeper"], torch.arange(500.0))
    assert type(optimizer.state[model.module.head.weight]["halves"]) is _InHalves


def _saves_and_sleeps(folder: str) -> tuple[int, int]:
    """A checkpoint reads shards and fills them, after which their memory is still torch's to free."""
    model, optimizer = _build("zero3", torch.float32)
    _step(model, optimizer, 0)
    first = model.release()
    model.restore()
    save_training(folder, model, optimizer)
    load_training(folder, model, optimizer)
    return first, model.release()


def test_memory_can_be_freed_after_a_checkpoint(tmp_path: Path) -> None:
    for first, second in run_distributed(_saves_and_sleeps, 2, str(tmp_path)):
        assert first == second > 0


def _sleeps_in_memory(kind: str) -> tuple[list[float], int]:
    """As a GPU's rank, which copies to pinned memory: here to memory of the host, as a device would read it."""
    model, optimizer = _build(kind, torch.bfloat16)
    _step(model, optimizer, 0)
    pinned = []

    def host(shape: list[int], dtype: torch.dtype) -> Tensor:
        pinned.append(torch.empty(shape, dtype=dtype))
        return pinned[-1]

    memory_for = released_memory._memory_for
    gpu = torch.device("cuda")
    own = mock.patch.object(released_memory, "_memory_for", lambda n, _, folder: memory_for(n, gpu, folder))
    with own, mock.patch.object(streams, "pinned", host):
        freed = model.release()
    model.restore()
    assert freed == sum(map(len, pinned))
    _step(model, optimizer, 1)
    return [tensor.double().sum().item() for tensor in _whole(model).values()], freed


@pytest.mark.parametrize("kind", ["zero3", "fsdp2"])
def test_values_are_kept_in_pinned_memory_of_a_gpu(kind: str) -> None:
    expected = run_distributed(_steps_in_bf16, 2, kind)[0]
    for sums, freed in run_distributed(_sleeps_in_memory, 2, kind):
        assert freed > 0 and sums == expected


def _steps_in_bf16(kind: str) -> list[float]:
    model, optimizer = _build(kind, torch.bfloat16)
    for number in range(2):
        _step(model, optimizer, number)
    return [tensor.double().sum().item() for tensor in _whole(model).values()]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kind", ["replicas", "zero3", "fsdp2"])
def test_a_gpus_allocator_has_the_memory(kind: str) -> None:
    with one_rank_on_a_gpu():
        torch.ones(8, 8, device="cuda", dtype=torch.bfloat16).mm(torch.ones(8, 8, device="cuda", dtype=torch.bfloat16))
        before = torch.cuda.memory_allocated()  # with the workspace of products
        model = wrap_model(Model().to("cuda", torch.bfloat16), None, copy.deepcopy(CONFIGS[kind]))
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.01), [model])
        x = torch.ones(8, WIDTH, device="cuda", dtype=torch.bfloat16)
        for _ in range(2):
            model.zero_grad_buffer()
            model(x).square().mean().backward()
            finalize_model_grads([model])
            optimizer.step()
        weights, held = _whole(model), torch.cuda.memory_allocated() - before
        copies = sum(tensor.untyped_storage().nbytes() for tensor in weights.values())
        model.release()
        assert torch.cuda.memory_allocated() - before - copies <= 0.02 * held
        model.restore()
        assert all(torch.equal(tensor, weights[name]) for name, tensor in _whole(model).items())
        model(x).square().mean().backward()


def _keeps_its_last_gather() -> tuple[int, int]:
    """A GPU's rank keeps what a forward has gathered last until the next gather; a CPU's does not, and is given it."""
    model, _ = _build("fsdp2", torch.float32)
    _evaluate(model, torch.float32)
    kept = SimpleNamespace(all_gather_result=SimpleNamespace(all_gather_output=torch.ones(4096)), event=None)
    model.engine.gradients.torch_state.tensors.groups[0].comm_ctx.all_gather_state = kept
    of_ranks = []
    for _ in range(2):
        gathered = model.engine.held()["gathered parameters"]
        of_ranks.append(sum(tensor.untyped_storage().nbytes() for tensor in gathered))
        model.release()
    model.restore()
    _evaluate(model, torch.float32)
    return of_ranks[0], of_ranks[1]


def test_the_last_gather_is_freed() -> None:
    for before, after in run_distributed(_keeps_its_last_gather, 2):
        assert before >= 4 * 4096 and after == 0
