"""The manifest of examples/kubernetes: its fields, its command, and the script around the launcher."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from core.training.config.arguments import parse_arguments
from core.training.launch.__main__ import _parse as parse_launch
from tests.unit._program import REPOSITORY, load_program

yaml = pytest.importorskip("yaml")

FOLDER = REPOSITORY / "examples" / "kubernetes"
ENVIRONMENT = {"NODES": "2", "NPROC": "8", "STEPS": "20", "DOMAIN": "gpt.here.svc", "JOB_COMPLETION_INDEX": "1"}

STUB = """#!/bin/bash
echo "$@" > "$RUN/arguments"
trap 'echo stopped > "$RUN/signalled"; kill $waiting; echo iter_0000007 > "$RUN/latest"; exit ${ON_SIGNAL:-0}' TERM
if [ -n "$WAITS" ]; then sleep 60 & waiting=$!; echo > "$RUN/began"; wait $waiting; fi
exit $STATUS
"""
"""Stands for Python with the launcher: ends with STATUS, or waits for a signal, and then has saved step 7."""


@pytest.fixture
def job() -> dict[str, Any]:
    """The template of the Job that the JobSet makes."""
    (document,) = yaml.safe_load_all((FOLDER / "jobset.yaml").read_text())
    assert (document["apiVersion"], document["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (replicated,) = document["spec"]["replicatedJobs"]
    assert (document["metadata"]["name"], replicated["name"], replicated["replicas"]) == ("gpt", "node", 1)
    assert document["spec"]["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    return replicated["template"]["spec"]


@pytest.fixture
def script(job: dict[str, Any]) -> str:
    (container,) = job["template"]["spec"]["containers"]
    assert container["command"] == ["bash", "-c"]
    (text,) = container["args"]
    return text


@pytest.fixture
def place(tmp_path: Path) -> dict[str, str]:
    """An environment in which `python` is the stub, and the folder of the run is there."""
    (tmp_path / "python").write_text(STUB)
    (tmp_path / "python").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, **ENVIRONMENT, "PATH": path, "RUN": str(tmp_path), "WAITS": "", "STATUS": "0"}


def test_programs_parse_the_flags_of_the_command(script: str, place: dict[str, str]) -> None:
    run = Path(place["RUN"])
    (run / "latest").write_text("iter_0000020\n")
    assert subprocess.run(["bash", "-c", script], env=place, timeout=60).returncode == 0
    dash_m, module, *arguments = shlex.split((run / "arguments").read_text())
    assert (dash_m, module) == ("-m", "shardstack.training.launch")
    options = parse_launch(arguments, "launch")
    assert (options.nnodes, options.node_rank, options.nproc_per_node) == (2, 1, 8)
    assert options.master_addr == "gpt-node-0-0.gpt.here.svc" and options.on_lost_rank == "replace"
    assert (REPOSITORY / options.script).is_file()
    config = parse_arguments(options.arguments, load_program("pretrain_gpt").DEFAULTS)
    assert config.checkpoint.save == config.checkpoint.load == run and config.use_torch_fsdp2


@pytest.mark.parametrize(
    ("status", "latest", "expected"),
    [
        (0, "iter_0000020", 0),
        (0, "iter_0000007", 75),
        (0, None, 75),
        (1, "iter_0000007", 1),
        (2, None, 2),
        (137, None, 137),
    ],
)
def test_the_status_says_whether_the_run_is_done(
    script: str, place: dict[str, str], status: int, latest: str | None, expected: int
) -> None:
    if latest:
        Path(place["RUN"], "latest").write_text(f"{latest}\n")
    assert (
        subprocess.run(["bash", "-c", script], env={**place, "STATUS": str(status)}, timeout=60).returncode == expected
    )


@pytest.mark.parametrize(("on_signal", "expected"), [(0, 75), (3, 3)])
def test_a_signal_reaches_the_launcher_which_may_save(
    script: str, place: dict[str, str], on_signal: int, expected: int
) -> None:
    run = Path(place["RUN"])
    process = subprocess.Popen(["bash", "-c", script], env={**place, "WAITS": "1", "ON_SIGNAL": str(on_signal)})
    deadline = time.monotonic() + 60
    while not (run / "began").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == expected and (run / "signalled").exists()


def test_fields_of_the_manifest_agree_with_each_other(job: dict[str, Any]) -> None:
    pod = job["template"]["spec"]
    (container,), (first,) = pod["containers"], pod["initContainers"]
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert first["env"] == container["env"] and first["image"] == container["image"]
    assert job["completionMode"] == "Indexed" and job["completions"] == job["parallelism"] == int(variables["NODES"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(variables["NPROC"])
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts["shm"] == "/dev/shm" and variables["RUN"].startswith(mounts["checkpoints"])
    assert pod["restartPolicy"] == "Never"  # which podFailurePolicy needs
    used = set(re.findall(r"\$([A-Z_]+)", container["args"][0] + first["args"][0]))
    assert used - {"JOB_COMPLETION_INDEX"} <= variables.keys()  # Kubernetes sets that one
    rules = {
        tuple(rule.get("onExitCodes", {}).get("values", ())): rule["action"]
        for rule in job["podFailurePolicy"]["rules"]
    }
    assert rules == {(2,): "FailJob", (75,): "Ignore", (): "Ignore"}


def test_other_variables_of_the_manifest_are_read(job: dict[str, Any]) -> None:
    (container,) = job["template"]["spec"]["containers"]
    names = {entry["name"] for entry in container["env"]}
    scripts = container["args"][0] + job["template"]["spec"]["initContainers"][0]["args"][0]
    sources = "".join(path.read_text() for path in (REPOSITORY / "core").rglob("*.py"))
    values = "".join(str(entry.get("value")) for entry in container["env"])
    unread = {
        name for name in names if f"${name}" not in scripts and f"$({name})" not in values and name not in sources
    }
    assert unread == set()


def test_the_image_installs_what_the_command_needs() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    assert "pip install --no-cache-dir '.[train]'" in text and "COPY . ." in text
    left_out = (REPOSITORY / ".dockerignore").read_text().split()
    assert {".git", ".venv*", "runs", "data"} <= set(left_out)
