"""The example of transformers' Trainer, as its users run it on two ranks."""

from __future__ import annotations

from pathlib import Path

from tests.unit._program import REPOSITORY, run_program
from tests.unit._quick import needs

pytestmark = needs("transformers", "accelerate")

EXAMPLE = REPOSITORY / "examples" / "hugging_face" / "trainer.py"


def test_the_example_learns_its_text_on_two_ranks(tmp_path: Path) -> None:
    import transformers

    ended = run_program(EXAMPLE, "--out", "run", folder=tmp_path, ranks=2)
    assert ended.status == 0, ended.err
    assert "'the quick brown fox jumps over t'" in ended.out
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run").num_parameters() > 0
    assert list((tmp_path / "run").glob("checkpoint-*/shardstack"))
