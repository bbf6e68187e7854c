"""The end of a step: biases move once, by the counts of all its micro-batches, and the log has the balance."""

import pytest
import torch

from core.transformer.moe import finish_step, logged_statistics, restart_step
from tests.unit._spawn import run_distributed
from tests.unit.transformer.moe._layers import layer_of

_BIASED = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}


def _loads(layer, *loads):
    """Lets the step have these counts."""
    layer.router.step_sums[:4] += torch.tensor(loads, dtype=torch.float64)


def test_biases_move_against_the_load_once_a_step():
    layer = layer_of(**_BIASED, moe_router_bias_update_rate=0.01)
    _loads(layer, 9, 1, 0, 2)
    _loads(layer, 0, 4, 8, 0)  # a second micro-batch: 9, 5, 8, 2 with a mean of 6
    finish_step([layer], None)
    torch.testing.assert_close(layer.router.expert_bias, torch.tensor([-0.01, 0.01, -0.01, 0.01]))
    _loads(layer, 3, 3, 3, 3)
    finish_step([layer], None)
    torch.testing.assert_close(layer.router.expert_bias, torch.tensor([-0.01, 0.01, -0.01, 0.01]))


def test_a_bias_balances_the_load():
    layer = layer_of(**_BIASED, moe_router_bias_update_rate=0.05)
    with torch.no_grad():
        layer.router.weight[0] += 1.0
    x = torch.rand(64, 4, 8)
    spread = []
    for _ in range(60):
        layer(x).sum().backward()
        counts = layer.router.step_sums[:4]
        spread.append((counts.max() / counts.mean()).item())
        finish_step([layer], None)
    assert spread[0] > 1.5 and spread[-1] < 1.2, spread


def test_evaluation_moves_no_bias():
    layer = layer_of(**_BIASED).eval()
    _loads(layer, 9, 1, 0, 2)
    finish_step([layer], None)
    assert not layer.router.expert_bias.any()


def test_a_step_that_did_not_end_is_forgotten():
    layer = layer_of(**_BIASED, moe_aux_loss_coeff=1.0)
    layer(torch.randn(5, 2, 8)).sum().backward()
    layer(torch.randn(5, 2, 8))
    restart_step([layer])
    assert not layer.router.step_sums.any() and layer.router.pending_loss is None


def test_frozen_layers_are_counted():
    layer = layer_of(**_BIASED).requires_grad_(False)
    layer(torch.randn(5, 2, 8))
    assert layer.router.step_sums[:4].sum() == 20


def test_the_log_has_means_over_layers_and_each_layer():
    layers = torch.nn.ModuleList(
        [layer_of(seed, moe_per_layer_logging=True, moe_aux_loss_coeff=0.1) for seed in (0, 1)]
    )
    assert logged_statistics(layers) is None
    for number, layer in enumerate(layers, start=1):
        layer.set_layer_number(number)
        layer(torch.randn(8, 2, 8)).sum().backward()
        layer.router.pending_loss = None
    counts = [layer.router.step_sums[:4].clone() for layer in layers]
    finish_step(list(layers), None)
    names, values = logged_statistics(layers)
    found = dict(zip(names, values.tolist(), strict=True))
    loads = [c / 8 for c in counts]
    assert found["moe/layer_2/expert_3/load"] == loads[1][3]
    assert found["moe/layer_1/load_max"] == loads[0].max()
    assert found["moe/load_max"] == pytest.approx((loads[0].max() + loads[1].max()).item() / 2)
    assert found["moe/load_min"] == pytest.approx((loads[0].min() + loads[1].min()).item() / 2)
    assert 0 < found["moe/entropy"] < 1.3863 and found["moe/dropped_share"] == 0 and found["moe/balance_loss"] > 0.9
    assert len(names) == 6 + 2 * (6 + 4)


def _moves_by_all_ranks(rank_loads):
    import torch.distributed as dist

    layer = layer_of(**_BIASED, moe_router_bias_update_rate=1.0)
    _loads(layer, *rank_loads[dist.get_rank()])
    finish_step([layer], dist.group.WORLD)
    return layer.router.expert_bias.tolist(), logged_statistics([layer])[1].tolist()


def test_biases_move_by_the_counts_of_all_ranks():
    results = run_distributed(_moves_by_all_ranks, 2, [(8, 0, 0, 0), (0, 6, 1, 5)])  # 8, 6, 1, 5: a mean of 5
    assert results[0] == results[1]
    assert results[0][0] == [-1.0, -1.0, 1.0, 0.0]
