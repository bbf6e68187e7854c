"""Which rank hangs, by what all ranks have called; and settings of the launcher that contradict."""

from __future__ import annotations

import pytest

from core.training.launch.__main__ import main
from core.training.launch.supervisor import behind


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ([{"dp": (5, True)}, {"dp": (4, False)}], [1]),
        ([{"dp": (5, True)}, {"dp": (4, False)}, {"dp": (5, True)}, {"dp": (4, False)}], [1, 3]),
        # rank 3 hangs: rank 2 waits for it in a tensor-parallel group, and so do rank 0 for rank 2, and rank 1
        (
            [
                {"tp01": (9, False), "dp02": (3, True)},
                {"tp01": (9, False), "dp13": (3, True)},
                {"tp23": (8, True), "dp02": (2, False)},
                {"tp23": (7, False), "dp13": (2, False)},
            ],
            [3],
        ),
        ([{"dp": (5, True)}, {"dp": (5, True)}], []),
        ([{}, {}], []),
    ],
    ids=["one of two", "two of four", "behind a waiting rank", "all wait", "no record"],
)
def test_ranks_that_others_wait_for_are_found(positions, expected):
    assert behind(positions, range(len(positions))) == expected


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--on-lost-rank", "shrink", "--lost-rank-timeout", "0"], "takes a positive number of seconds"),
        (["--spare-processes", "1"], "without --on-lost-rank replace or shrink"),
        (["--on-lost-rank", "replace", "--spare-processes", "-1"], "takes zero or a positive number"),
        (["--on-lost-rank", "grow"], "invalid choice"),
    ],
)
def test_settings_that_contradict_are_refused(capsys, flags, said):
    with pytest.raises(SystemExit) as ended:
        main([*flags, "program.py"])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
