from __future__ import annotations

import torch

from core.base.memory_categories import GATHERED, GRADIENTS, PARAMETERS, held_storages, optimizer_tensors


def test_shared_memory_counts_once_in_the_first_category():
    whole, empty = torch.zeros(4, 4), torch.zeros(0)
    held = [(PARAMETERS, [whole[1:]]), (GATHERED, [whole, torch.zeros(8, device="meta"), empty]), (GRADIENTS, [])]
    assert held_storages(held, "cpu") == {whole.data_ptr(): (PARAMETERS, 64)}


def test_an_optimizer_holds_its_state_and_what_it_updates():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(3)
    assert [id(tensor) for tensor in optimizer_tensors(optimizer)] == [id(weight)]
    optimizer.step()
    assert sorted(tensor.numel() for tensor in optimizer_tensors(optimizer)) == [1, 3, 3, 3]
