"""Faults of `core.run_log`."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

MUTATIONS = (
    Mutation(
        "the log has the loss of the first rank",
        "core.run_log.figures.Figures.take",
        r"if not self\._averages",
        "if True",
        ("tests/unit/run_log/test_log.py::test_any_wrapper_has_the_same_log",),
    ),
    Mutation(
        "the log names the fastest rank",
        "core.run_log.figures.Figures.take",
        r"leads\.index\(max\(leads\)\)",
        "leads.index(min(leads))",
        ("tests/unit/run_log/test_log.py::test_the_slowest_rank_is_named",),
    ),
    Mutation(
        "the log adds up the elements of a loss",
        "core.run_log.figures.Figures.add",
        r"\.mean\(\)",
        ".sum()",
        ("tests/unit/run_log/test_log.py::test_losses_are_read_at_logged_steps_alone",),
    ),
    Mutation(
        "a run that goes on has the step of its checkpoint twice",
        "core.run_log.files.LinesFile.begin",
        r"step < first",
        "step <= first",
        ("tests/unit/run_log/test_files.py::test_a_resumed_run_goes_on_after_its_checkpoint",),
    ),
)
