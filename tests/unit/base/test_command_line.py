"""The parser of commands: one line for each error, with the nearest flag, on the first rank alone."""

from __future__ import annotations

import pytest

from core.base.command_line import CommandParser


@pytest.fixture
def parser() -> CommandParser:
    parser = CommandParser()
    parser.add_argument("--nproc-per-node", type=int)
    parser.add_argument("--nnodes", type=int)
    parser.add_argument("script")
    return parser


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "the following arguments are required: script; see --help"),
        ("--nprocs x.py", "unrecognized arguments: --nprocs; did you mean --nproc-per-node?"),
        ("--nprocs=2 x.py", "unrecognized arguments: --nprocs=2; did you mean --nproc-per-node?"),
        ("x.py --quick", "unrecognized arguments: --quick; see --help"),
        ("--nproc-per-node x x.py", "argument --nproc-per-node: invalid int value: 'x'; see --help"),
    ],
)
def test_an_error_is_one_line_of_the_first_rank(parser, capsys, monkeypatch, words: str, said: str):
    for rank, line in (("0", f"error: {said}\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as end:
            parser.parse_args(words.split())
        assert end.value.code == 2 and capsys.readouterr().err == line


def test_what_to_do_is_said_once(parser: CommandParser, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parser.error("--nproc-per-node is 0; it takes a positive number")
    assert capsys.readouterr().err == "error: --nproc-per-node is 0; it takes a positive number\n"
