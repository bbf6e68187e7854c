"""Scripts that need no change under torchrun over several nodes, Ray Train and Lightning's own launcher."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from core.dist_checkpointing import latest_checkpoint
from tests.unit._program import LIMIT_S, REPOSITORY, TINY, program_environment, run_program

FAILING = REPOSITORY / "tests" / "functional" / "_failing_rank.py"
EXAMPLES = REPOSITORY / "examples"


def _hashes(folder: Path) -> dict[str, str]:
    """Returns the hash of each tensor of a checkpoint, under any layout."""
    index = json.loads((folder / "checkpoint.json").read_text())
    return {name: entry["hash"] for name, entry in index["tensors"].items()}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _on_two_nodes(script: Path, arguments: list[object], folder: Path, restarts: int, **variables: str) -> list[str]:
    """Runs a script under two node agents of torchrun on the loopback interface, one rank each; what each wrote."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{_free_port()}", "--rdzv-id", "nodes"]
    agents = [
        subprocess.Popen(
            [*agent, *meeting, "--local-addr", "127.0.0.1", "--max-restarts", str(restarts), script, *arguments],
            cwd=folder,
            env=program_environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        written = [process.communicate(timeout=LIMIT_S)[0] for process in agents]
    finally:
        for process in agents:
            process.kill()
    assert [process.returncode for process in agents] == [0, 0], written
    return written


@pytest.mark.long
def test_torchrun_restarts_all_nodes_from_the_checkpoint(corpus: Path, tmp_path: Path) -> None:
    common = [*TINY, "--train-iters", "5", "--save-interval", "1", "--data-path", corpus, "--use-torch-fsdp2"]
    common += ["--attention-dropout", "0.1"]
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    _on_two_nodes(EXAMPLES / "gpt" / "pretrain_gpt.py", [*common, "--save", straight], tmp_path, 0)
    written = _on_two_nodes(FAILING, [*common, "--save", broken], tmp_path, 1, CRASH_RANK="1", CRASH_ROUND="0")
    assert any("a planted crash" in text for text in written)
    last = latest_checkpoint(broken)
    assert last is not None and last.name == "iter_0000005"
    assert _hashes(last) == _hashes(straight / "iter_0000005")


RAY = """
import sys
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import ray_train


def fails_once(settings):
    if not Path(settings["folder"], "latest").exists():
        ray_train.train(settings | {"steps": 2})
        raise RuntimeError("a planted failure")
    ray_train.train(settings)


folder = sys.argv[1]
ray.init(num_cpus=2, include_dashboard=False)
run = RunConfig(storage_path=f"{folder}/ray", failure_config=FailureConfig(max_failures=1))
settings = {"folder": f"{folder}/run", "steps": 3}
scaling = ScalingConfig(num_workers=2)
TorchTrainer(fails_once, train_loop_config=settings, scaling_config=scaling, run_config=run).fit()
"""

ALONE = """
import sys

import ray.train

import ray_train

ray.train.report = lambda metrics: None
ray_train.train({"folder": sys.argv[1], "steps": 3})
"""


@pytest.mark.long  # Ray takes half a minute to start
@pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra 'ray'")
def test_ray_train_workers_match_torchrun_and_survive_a_failure(tmp_path: Path) -> None:
    for name, text in (("on_ray.py", RAY), ("alone.py", ALONE)):
        (tmp_path / name).write_text(text)
    path = os.pathsep.join([str(EXAMPLES), str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = program_environment() | {"PYTHONPATH": path}
    launch = ["-m", "core.training.launch", "--nproc-per-node", "2"]
    commands = (["on_ray.py", str(tmp_path)], [*launch, "alone.py", str(tmp_path / "alone")])
    for command in commands:
        ended = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert ended.returncode == 0, ended.stderr[-4000:]
    assert _hashes(tmp_path / "run" / "iter_0000003") == _hashes(tmp_path / "alone" / "iter_0000003")


@pytest.mark.skipif(find_spec("lightning") is None, reason="needs the extra 'lightning'")
def test_the_example_of_lightning_starts_its_ranks_itself(tmp_path: Path) -> None:
    importable = program_environment()["PYTHONPATH"]  # by the ranks that Lightning starts
    script = EXAMPLES / "lightning_trainer.py"
    ended = run_program(script, "--sharding", "optim", "--ranks", "2", folder=tmp_path, PYTHONPATH=importable)
    assert ended.status == 0, ended.err[-4000:]
    lines = [line for line in ended.out.splitlines() if "after 8 steps" in line]
    assert sorted(line.partition(":")[0] for line in lines) == ["rank 0", "rank 1"]
    (saved,) = (tmp_path / "runs" / "lightning").glob("*.ckpt")
    assert len(list(saved.glob("rank_*.bin"))) == 2
