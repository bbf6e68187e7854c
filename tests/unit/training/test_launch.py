"""The launcher with programs that need no torch; runs of ranks that talk are in tests/functional."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from core.training.launch import main


@pytest.fixture
def program(tmp_path: Path):
    def write(text: str) -> str:
        (tmp_path / "program.py").write_text(f"import os, sys, time\nrank = int(os.environ['RANK'])\n{text}\n")
        return str(tmp_path / "program.py")

    return write


def test_ranks_get_what_torchrun_gives_and_their_arguments(program, tmp_path: Path):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    text = (
        f"open(sys.argv[1] + str(rank), 'w').write(' '.join(os.environ[n] for n in {names}) + ' '.join(sys.argv[2:]))"
    )
    assert main(["--nproc-per-node", "3", program(text), f"{tmp_path}/out", "--flag", "-x"]) == 0
    threads = os.environ["OMP_NUM_THREADS"]
    for rank in range(3):
        assert (tmp_path / f"out{rank}").read_text() == f"{rank} {rank} 3 3 127.0.0.1 {threads}--flag -x"


def test_the_first_rank_to_fail_decides_the_status_and_the_others_are_ended(program, capsys, monkeypatch):
    monkeypatch.setattr("core.training.launch.GRACE_S", 0.2)
    assert main(["--nproc-per-node", "2", program("sys.exit(7) if rank == 1 else time.sleep(60)")]) == 7
    assert capsys.readouterr().err == ""
    assert main(["--nproc-per-node", "2", program("os.kill(os.getpid(), 9) if rank else time.sleep(60)")]) == 137
    assert "rank 1 was ended by SIGKILL" in capsys.readouterr().err


def test_wrong_arguments_are_one_line_more_than_the_usage(capsys):
    for arguments in (["--nproc-per-node", "0", "x.py"], []):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2
    assert "it takes a positive number" in capsys.readouterr().err
