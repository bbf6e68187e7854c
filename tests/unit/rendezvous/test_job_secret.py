"""The secret of a job: where it comes from, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from core.base.errors import ConfigError
from core.rendezvous.job_secret import SECRET, SECRET_FILE, job_secret


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(SECRET, "of the environment")
    monkeypatch.setenv(SECRET_FILE, str(tmp_path / "job.secret"))
    return tmp_path / "job.secret"


def test_a_file_goes_before_the_environment(file: Path):
    file.write_text("0123456789abcdef\n")
    file.chmod(0o600)
    assert job_secret() == b"0123456789abcdef"


@pytest.mark.parametrize("host", ["localhost", "10.0.0.1"])
@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("0123456789abcdef", 0o640, "others may read; run: chmod 600"),
        ("0123456789abcde", 0o600, "has 15 characters; a secret takes 16 or more"),
        ("\n", 0o600, "has 0 characters; a secret takes 16 or more"),
        ("0" * 5000, 0o600, "it has 5000 bytes"),
        (None, 0o600, "it is no regular file"),
    ],
)
def test_a_file_that_has_no_secret_is_one_line(file: Path, host: str, text: str | None, mode: int, said: str):
    os.mkfifo(file) if text is None else file.write_text(text)
    file.chmod(mode)
    with pytest.raises(ConfigError) as error:
        job_secret(host)
    assert said in str(error.value) and str(error.value).count(SECRET_FILE) <= 2
    assert str(error.value).count("SECRET_FILE is") == str(error.value).startswith(SECRET_FILE)
