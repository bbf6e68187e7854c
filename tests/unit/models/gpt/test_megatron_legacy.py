"""Weights come out of files of Megatron-LM's format ``torch``, which its own models fill, and nothing in them runs."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core.base.errors import CheckpointError
from core.models.gpt.megatron_layout import find_megatron, load_megatron
from tests.unit._quick import needs
from tests.unit._spawn import on_ranks
from tests.unit.adapters import _megatron
from tests.unit.dist_checkpointing._pieces import Bomb
from tests.unit.models.gpt.test_megatron_files import EXPERTS, GATED, MIXED, own_model, sharded_state
from tests.unit.models.gpt.test_megatron_layout import theirs

NAMES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")


def _write(root: Path, name: str, model: dict[str, Any], degrees: tuple[int, int, int], **more: Any) -> Path:
    """Writes one rank's file as Megatron-LM's `save_checkpoint` does."""
    folder = root / "iter_0000003" / name
    folder.mkdir(parents=True, exist_ok=True)
    arguments = Namespace(**dict(zip(NAMES, degrees, strict=True)), bomb=Bomb(root / "ran"), dtype=torch.bfloat16)
    state = {"args": arguments, "checkpoint_version": 3.0, "iteration": 3, "model": model, **more}
    torch.save(state, folder / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("3")
    return root


@needs("megatron")
@pytest.mark.parametrize(
    ("tied", "tensor", "pipeline", "fields"),
    [(False, 2, 1, GATED), (True, 2, 1, {}), (True, 1, 2, {}), (False, 1, 1, EXPERTS), (False, 1, 1, MIXED)],
)
@on_ranks(2)
def test_files_of_its_ranks_load(
    tmp_path: Path, tied: bool, tensor: int, pipeline: int, fields: dict[str, Any]
) -> None:
    from megatron.core import dist_checkpointing, parallel_state

    from core.models.gpt.megatron_layout import save_megatron

    own = own_model(tied, **fields)
    save_megatron(own, tmp_path / "ours")
    with _megatron.groups(pipeline, tensor):
        if pipeline > 1:
            model = _megatron.build_stage(tied)
        else:
            model = _megatron.build(tied, tensor_model_parallel_size=tensor, **fields)
        state = dist_checkpointing.load(sharded_state(model), str(tmp_path / "ours" / "release"))
        model.load_state_dict(state["model"], strict=True)
        stage = f"_{parallel_state.get_pipeline_model_parallel_rank():03}" if pipeline > 1 else ""
        name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02}{stage}"
        if parallel_state.get_data_parallel_rank() == 0:
            _write(tmp_path / "run", name, model.state_dict_for_save_checkpoint(), (tensor, pipeline, 1))
        dist.barrier()
    load_megatron(back := own_model(tied, seed=6, vocab_size=_megatron.VOCAB + 16, **fields), tmp_path / "run")
    for key, tensor_there in own.state_dict().items():
        assert torch.equal(back.state_dict()[key][: len(tensor_there)], tensor_there), key
    assert not (tmp_path / "ran").exists() and not (tmp_path / "run" / "ran").exists()


def _parts(model: Any, stages: int, virtual: int = 1) -> list[dict[str, Any]]:
    """Returns what each pipeline stage has of a plain model, by chunk."""
    whole = theirs(model, stacked=False, fused_norms=False)
    layers = model.config.num_layers // (stages * virtual)
    found = []
    for stage in range(stages):
        of_stage: dict[str, Any] = {}
        for chunk in range(virtual):
            first = (chunk * stages + stage) * layers
            tensors = {
                f"decoder.layers.{number}.{rest}": whole[name]
                for number in range(layers)
                for name in whole
                if (rest := name.removeprefix(f"decoder.layers.{first + number}.")) != name
            }
            others = {name: tensor for name, tensor in whole.items() if "layers." not in name}
            is_here = {"embedding": first == 0, "decoder.final": first + layers == model.config.num_layers}
            is_here["output"] = is_here["decoder.final"]
            tensors |= {
                n: t for n, t in others.items() if any(n.startswith(p) and here for p, here in is_here.items())
            }
            tensors["decoder._extra_state"] = None
            of_stage["model" if virtual == 1 else f"model{chunk}"] = torch.nn.Module().state_dict() | tensors
        found.append(of_stage)
    return found


@pytest.mark.parametrize(("stages", "virtual"), [(1, 1), (2, 1), (2, 2)])
def test_virtual_stages_are_in_order(tmp_path: Path, stages: int, virtual: int) -> None:
    from tests.unit.models.gpt.test_hugging_face import build

    model = build("gpt2", num_layers=4)
    for number, part in enumerate(_parts(model, stages, virtual)):
        name = "mp_rank_00" if stages == 1 else f"mp_rank_00_{number:03}"
        _write(tmp_path, name, part.pop("model", {}), (1, stages, 1), **part)
    assert find_megatron(tmp_path) == tmp_path / "iter_0000003"
    load_megatron(back := build("gpt2", num_layers=4, seed=4), tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), model.parameters(), strict=True))
    assert not (tmp_path / "ran").exists()


def test_odd_files_are_refused_in_one_line(tmp_path: Path) -> None:
    from tests.unit.models.gpt.test_hugging_face import build

    model = build("gpt2")
    whole = theirs(model, stacked=False, fused_norms=False)

    def refuses(match: str, name: str, state: dict[str, Any], degrees: tuple[int, int, int]) -> None:
        root = tmp_path / str(len([*tmp_path.iterdir()]))
        _megatron.raises_one_line(CheckpointError, match, load_megatron, model, _write(root, name, state, degrees))

    refuses("has 1 files, of 2 x 1 ranks", "mp_rank_00", whole, (2, 1, 1))
    refuses("experts of one rank among several", "mp_rank_00_001", whole, (1, 1, 2))
    turned = whole | {"decoder.layers.0.mlp.linear_fc1.weight": whole["decoder.layers.0.mlp.linear_fc2.weight"].t()}
    refuses(r"shape \\[64, 16\\] is stored with the strides|strides", "mp_rank_00", turned, (1, 1, 1))
    refuses("is of another model", "mp_rank_00", whole | {"decoder.layers.0.other": torch.ones(2)}, (1, 1, 1))
    refuses("holds no GPT", "mp_rank_00", {}, (1, 1, 1))
    file = _write(tmp_path / "cut", "mp_rank_00", whole, (1, 1, 1)) / "iter_0000003/mp_rank_00/model_optim_rng.pt"
    file.write_bytes(file.read_bytes()[:-5000])
    _megatron.raises_one_line(CheckpointError, "damaged", load_megatron, model, tmp_path / "cut")
