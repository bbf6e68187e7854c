"""Runs a script of Megatron-LM on a CPU, by gloo: the names of CUDA mean the CPU, NCCL means gloo, triton is a mock.

    torchrun --nproc-per-node 2 _megatron_on_cpu.py FOLDER/pretrain_gpt.py FLAGS

FOLDER holds the sources of Megatron-LM. With the environment variable FIRST=core.adapters.megatron_lm the adapter is
imported before the script. Both runs have the same stand-ins. The first rank prints "BUILT" and the wrapper's class.
"""

import contextlib
import functools
import importlib
import importlib.machinery
import os
import sys
import types
import typing
from pathlib import Path
from unittest import mock

os.environ.setdefault("NO_VCS_VERSION", "1")
if not hasattr(typing, "override"):  # 0.20 imports it, and Python 3.11 has none
    typing.override = lambda function: function

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.device_mesh as device_mesh
import torch.utils._triton as torch_triton
import torch.utils.flop_counter
from torch.distributed.device_mesh import DeviceMesh


def nothing(*args, **kwargs):
    return None


def zero(*args, **kwargs):
    return 0


def decorator(function=None, *args, **kwargs):
    return function if callable(function) else (lambda inner: inner)


class MockModule(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, mock.MagicMock(name=name))
        return vars(self)[name]


def stand_in_for_triton():
    """Makes modules of triton whose names are mocks, after torch has seen that there is no triton."""
    for name in dir(torch_triton):
        if name.startswith("has_triton"):
            setattr(torch_triton, name, lambda *args, **kwargs: False)
    ends = ("", ".language", ".runtime", ".runtime.jit", ".runtime.driver", ".compiler", ".testing", ".tools")
    ends += (".language.extra", ".language.extra.libdevice", ".language.extra.cuda", ".tools.tensor_descriptor")
    for name in ["triton" + end for end in ends]:
        module = MockModule(name)
        module.__path__, module.__spec__ = [], importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module
        owner, _, own_name = name.rpartition(".")
        if owner:
            setattr(sys.modules[owner], own_name, module)
    triton, language = sys.modules["triton"], sys.modules["triton.language"]
    triton.jit, triton.Config, triton.__version__ = decorator, mock.MagicMock(), "3.0.0"
    triton.autotune = triton.heuristics = lambda *args, **kwargs: lambda function: function
    language.constexpr, language.dtype = int, type("dtype", (), {})


class Event:
    def __init__(self, *args, **kwargs): ...

    record = wait = synchronize = nothing

    def query(self):
        return True

    def elapsed_time(self, other):
        return 1.0


class Stream:
    cuda_stream, device = 0, torch.device("cpu")

    def __init__(self, *args, **kwargs): ...

    wait_stream = wait_event = synchronize = nothing

    def query(self):
        return True

    def record_event(self, event=None):
        return event or Event()

    def __enter__(self):
        return self

    def __exit__(self, *args): ...


class Generators:
    def __getitem__(self, index):
        return torch.default_generator

    def __len__(self):
        return 8


class Nvtx:
    def __getattr__(self, name):
        return nothing


def stand_in_for_cuda():
    """Gives `torch.cuda` the functions of a CPU."""
    properties = types.SimpleNamespace(
        name="cpu", major=8, minor=0, total_memory=2**34, multi_processor_count=1, warp_size=32
    )
    names = {
        "is_available is_initialized is_bf16_supported": lambda *args, **kwargs: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: 8,
        "current_device memory_allocated max_memory_allocated memory_reserved max_memory_reserved utilization": zero,
        "set_device set_stream synchronize empty_cache ipc_collect manual_seed_all _lazy_init": nothing,
        "reset_peak_memory_stats": nothing,
        "device stream": lambda *args: contextlib.nullcontext(),
        "current_stream default_stream": lambda *args: Stream(),
        "Stream": Stream,
        "Event": Event,
        "get_device_properties": lambda *args: properties,
        "get_device_capability": lambda *args: (8, 0),
        "get_device_name": lambda *args: "cpu",
        "memory_stats": lambda *args: dict.fromkeys(("num_alloc_retries", "allocation.all.current"), 0),
        "mem_get_info": lambda *args: (2**34, 2**34),
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
        "manual_seed": torch.default_generator.manual_seed,
        "initial_seed": torch.initial_seed,
        "seed": torch.seed,
        "_lazy_call": lambda function, **kwargs: function(),
        "nvtx": Nvtx(),
        "default_generators": Generators(),
    }
    streams = importlib.import_module("torch.cuda.random")
    for name, value in ((name, value) for names_, value in names.items() for name in names_.split()):
        setattr(torch.cuda, name, value)
        if "rng_state" in name:
            setattr(streams, name, value)
    for name in ("Float", "Int", "Long", "BFloat16", "Half", "Double", "Byte", "Bool"):
        setattr(torch.cuda, name + "Tensor", getattr(torch, name + "Tensor"))


def on_cpu(device):
    is_index = isinstance(device, int) and not isinstance(device, bool)
    is_name = isinstance(device, str) and device.startswith("cuda")
    return torch.device("cpu") if is_index or is_name or getattr(device, "type", None) == "cuda" else device


def device_by_name(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        if kwargs.get("device") is not None:
            kwargs["device"] = on_cpu(kwargs["device"])
        return function(*args, **kwargs)

    return call


def stand_in_for_devices():
    """Lets tensors and modules that go to a CUDA device stay on the CPU."""
    factories = "empty zeros ones full rand randn randint randperm tensor arange linspace logspace eye empty_strided"
    factories += " as_tensor asarray empty_like zeros_like ones_like full_like rand_like randn_like randint_like"
    for name in factories.split():
        setattr(torch, name, device_by_name(getattr(torch, name)))
    for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"):
        setattr(torch.Tensor, name, device_by_name(getattr(torch.Tensor, name)))
    for owner in (torch.Tensor, torch.nn.Module):

        def to(self, *args, _to=owner.to, **kwargs):
            first = [on_cpu(x) if isinstance(x, (str, int, torch.device)) else x for x in args[:1]]
            named = {name: on_cpu(value) if name == "device" else value for name, value in kwargs.items()}
            return _to(self, *first, *args[1:], **named)

        owner.cuda, owner.to = lambda self, *args, **kwargs: self, to
    torch.nn.Module.to_empty = device_by_name(torch.nn.Module.to_empty)
    of_type = torch.Tensor.type

    def type_(self, *args, **kwargs):  # Megatron-LM compares it with "torch.cuda.HalfTensor"
        found = of_type(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    torch.Tensor.type, torch.Tensor.record_stream = type_, nothing
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.Tensor.is_cuda = property(lambda self: not self.is_meta)
    torch.compile = decorator


def stand_in_for_nccl():
    """Lets groups and meshes of CUDA devices be of gloo."""
    mesh_init, init_mesh, of_group = DeviceMesh.__init__, device_mesh.init_device_mesh, DeviceMesh.from_group
    DeviceMesh.__init__ = lambda self, device_type, *args, **kwargs: mesh_init(self, "cpu", *args, **kwargs)
    device_mesh.init_device_mesh = lambda device_type, *args, **kwargs: init_mesh("cpu", *args, **kwargs)
    dist.init_device_mesh = device_mesh.init_device_mesh
    DeviceMesh.from_group = staticmethod(
        lambda group, device_type=None, *args, **kwargs: of_group(group, "cpu", *args, **kwargs)
    )
    make_world, make_group = dist.init_process_group, dist.new_group

    @functools.wraps(make_world)
    def init_process_group(backend=None, *args, **kwargs):
        kwargs.pop("device_id", None)
        return make_world("gloo", *args, **kwargs)

    @functools.wraps(make_group)
    def new_group(ranks=None, timeout=None, backend=None, pg_options=None, *args, **kwargs):
        kwargs.pop("device_id", None)
        return make_group(ranks, timeout, "gloo", None, *args, **kwargs)

    for module in (dist, dist.distributed_c10d):
        module.init_process_group, module.new_group = init_process_group, new_group
        if not hasattr(module, "ProcessGroupNCCL"):
            module.ProcessGroupNCCL = mock.MagicMock()


def report_what_is_built():
    training = importlib.import_module("megatron.training.training")
    set_up = training.setup_model_and_optimizer

    def setup_model_and_optimizer(*args, **kwargs):
        found = set_up(*args, **kwargs)
        if dist.get_rank() == 0:
            kinds = [type(thing) for thing in (*found[0], found[1])]
            names = " ".join(f"{kind.__module__}.{kind.__name__}" for kind in kinds)
            sys.stdout.write(f"\nBUILT {names}\n")  # one write, which no other rank's cuts where nothing is buffered
        return found

    training.setup_model_and_optimizer = setup_model_and_optimizer


# At import, and not in `main`: processes that a checkpoint spawns import this module as theirs.
sys.path.insert(0, str(Path(sys.argv[1]).parent) if len(sys.argv) > 1 and Path(sys.argv[1]).is_file() else "")
stand_in_for_triton()
stand_in_for_cuda()
stand_in_for_devices()
stand_in_for_nccl()
importlib.import_module("megatron.core.datasets.utils").compile_helpers = nothing
with contextlib.suppress(ImportError):  # up to 0.16: it compiles kernels
    importlib.import_module("megatron.legacy.fused_kernels").load = nothing

if __name__ == "__main__":
    del sys.argv[0]
    if first := os.environ.get("FIRST"):
        importlib.import_module(first)
    report_what_is_built()
    exec(compile(Path(sys.argv[0]).read_text(), sys.argv[0], "exec"), globals())
