"""Small names that Megatron-LM's scripts import: helpers, process groups as one object, micro-batches of a step."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from core import num_microbatches_calculator as calculator
from core import parallel_state, utils
from core.base.errors import ConfigError, ParallelConfigError, ParallelStateError
from core.distributed import DistributedDataParallelConfig, finalize_model_grads, wrap_model
from core.enums import ModelType
from core.parallel_state import check_same_groups
from core.pipeline_parallel import forward_backward_pipelining_without_interleaving, get_forward_backward_func
from core.process_groups_config import ProcessGroupCollection
from core.transformer import Float16Module, MegatronModule, TransformerConfig
from core.transformer.module import mark_keep_in_fp32
from tests.unit._ranks import fake_world
from tests.unit._spawn import on_ranks

SIZES = {"num_layers": 2, "hidden_size": 12, "num_attention_heads": 4}


class _Module(MegatronModule):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.linear = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_helpers_see_through_wrappers():
    config = TransformerConfig(**SIZES, bf16=True)
    inner = _Module(config)
    inner.model_type = ModelType.encoder_or_decoder
    model = Float16Module(config, inner)
    assert utils.unwrap_model(model) is inner and utils.unwrap_model([model]) == [inner]
    assert utils.unwrap_model(model, (nn.Linear,)) is model
    assert utils.get_model_config(model) is config
    assert utils.get_attr_wrapped_model(model, "model_type") is ModelType.encoder_or_decoder
    assert utils.get_attr_wrapped_model(model, "linear", return_model_obj=True) is inner
    with pytest.raises(ConfigError, match="neither Float16Module nor the model inside it has the attribute 'absent'"):
        utils.get_attr_wrapped_model(model, "absent")
    with pytest.raises(ConfigError, match="given a list"):
        utils.get_model_config([model])


def test_absent_helpers_name_what_to_use():
    with pytest.raises(ImportError, match=r"StragglerDetector: shardstack.training's log"):
        from core.utils import StragglerDetector  # noqa: F401


@on_ranks(2)
def test_a_batch_is_cut_over_context_parallel_ranks() -> None:
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    tokens = torch.arange(8).view(1, 8)
    batch = utils.get_batch_on_this_cp_rank({"tokens": tokens, "attention_mask": None})
    rank = parallel_state.get_context_parallel_rank()
    assert batch["tokens"].tolist() == [[[0, 1, 6, 7], [2, 3, 4, 5]][rank]] and batch["attention_mask"] is None
    with pytest.raises(ParallelConfigError, match=r"cu_seqlens .* document_starts"):
        utils.get_batch_on_this_cp_rank({"tokens": tokens, "cu_seqlens": [0, 8]})
    with pytest.raises(ParallelConfigError, match="s x s elements"):
        utils.get_batch_on_this_cp_rank({"attention_mask": torch.ones(1, 1, 8, 8)})


def test_parameters_may_stay_in_fp32_and_outputs_in_half():
    config = TransformerConfig(**SIZES, bf16=True)
    inner = _Module(config)
    inner.linear.bias = mark_keep_in_fp32(inner.linear.bias)
    assert Float16Module(config, _Module(config))(torch.ones(1, 2), fp32_output=False).dtype is torch.bfloat16
    model = Float16Module(config, inner)
    assert (model.module.linear.weight.dtype, model.module.linear.bias.dtype) == (torch.bfloat16, torch.float32)


def test_groups_as_one_object():
    with pytest.raises(ParallelStateError):
        ProcessGroupCollection.use_mpu_process_groups()
    with fake_world(5, 8):
        parallel_state.initialize_model_parallel(2, context_parallel_size=2)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        assert groups.dp_cp_ag is None and groups.hcp is None
        some = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        assert some.dp is None and "tp: 2 ranks, cp: 2 ranks" in repr(some)
        assert vars(ProcessGroupCollection.use_mpu_process_groups([])) == {}
        check_same_groups("f", some, ("tp", "cp"))
        with pytest.raises(
            ParallelConfigError, match=r"f: pg_collection.tp has the ranks .* shardstack.parallel_state has"
        ):
            check_same_groups("f", ProcessGroupCollection(tp=groups.dp_cp), ("tp",))
    with pytest.raises(ParallelConfigError, match="has no group 'xp'"):
        ProcessGroupCollection(xp=None)


def test_a_collection_has_the_groups_of_the_getters():
    with fake_world(5, 32):
        parallel_state.initialize_model_parallel(
            2,
            2,
            context_parallel_size=2,
            expert_model_parallel_size=4,
            expert_tensor_parallel_size=1,
            num_distributed_optimizer_instances=2,
        )
        dp, expert_dp = parallel_state.get_data_parallel_group, parallel_state.get_expert_data_parallel_group
        expected = {
            "tp": parallel_state.get_tensor_model_parallel_group(),
            "pp": parallel_state.get_pipeline_model_parallel_group(),
            "mp": parallel_state.get_model_parallel_group(),
            "embd": parallel_state.get_embedding_group(),
            "pos_embd": parallel_state.get_position_embedding_group(),
            "cp": parallel_state.get_context_parallel_group(),
            "tp_cp": parallel_state.get_tensor_and_context_parallel_group(),
            "tp_dp_cp": parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
            "dp": dp(),
            "dp_cp": dp(with_context_parallel=True),
            "dp_cp_gtp_remat": dp(with_context_parallel=True),
            "intra_dp_cp": dp(with_context_parallel=True, partial_data_parallel=True),
            "ep": parallel_state.get_expert_model_parallel_group(),
            "expt_tp": parallel_state.get_expert_tensor_parallel_group(),
            "tp_ep": parallel_state.get_expert_tensor_and_model_parallel_group(),
            "tp_ep_pp": parallel_state.get_expert_tensor_model_pipeline_parallel_group(),
            "tp_ep_pp_with_egtp_remat": parallel_state.get_expert_tensor_model_pipeline_parallel_group(),
            "expt_dp": expert_dp(),
            "expt_dp_gtp_remat": expert_dp(),
            "intra_expt_dp": expert_dp(partial_expert_data_parallel=True),
            "inter_dist_opt": parallel_state.get_inter_distributed_optimizer_instance_group(),
            "intra_dist_opt": parallel_state.get_intra_distributed_optimizer_instance_group(),
        }
        made = vars(ProcessGroupCollection.use_mpu_process_groups())
        assert {name: group for name, group in made.items() if group is not None} == expected


def test_the_number_of_micro_batches():
    with pytest.raises(ConfigError, match="not set"):
        calculator.get_num_microbatches()
    try:
        calculator.init_num_microbatches_calculator(0, 12, 2, 3)
        assert calculator.get_num_microbatches() == 2
        with pytest.raises(ConfigError, match="set already"):
            calculator.init_num_microbatches_calculator(0, 12, 2, 3)
        calculator.unset_num_microbatches_calculator()
        with pytest.raises(ParallelConfigError, match="global_batch_size 13 is no multiple of micro_batch_size 2 x"):
            calculator.init_num_microbatches_calculator(0, 13, 2, 3)
        calculator.init_num_microbatches_calculator(0, 13, 2, 3, True)
        assert calculator.get_num_microbatches() == 2
    finally:
        calculator.unset_num_microbatches_calculator()


# ---- the micro-batches of a step


def _model(per_token: bool) -> tuple[nn.Linear, SimpleNamespace]:
    model = nn.Linear(1, 1, bias=False)
    model.config = SimpleNamespace(calculate_per_token_loss=per_token)
    nn.init.ones_(model.weight)
    return model, model.config


def _steps(model: nn.Module, loss: object, **given: object) -> list[object]:
    return get_forward_backward_func()(
        forward_step_func=lambda data, chunk: (chunk(next(data)), loss),
        data_iterator=[iter(torch.tensor([[1.0], [2.0], [6.0]]))],
        model=model if isinstance(model, list) else [model],
        num_microbatches=3,
        seq_length=1,
        micro_batch_size=1,
        **given,
    )


def test_micro_batch_losses_are_averaged_by_batch_or_by_token():
    model, _ = _model(False)
    assert _steps(model, lambda out: (out.sum(), out.item())) == [1.0, 2.0, 6.0]
    assert model.weight.grad.item() == 3.0  # (1 + 2 + 6) / 3
    model, _ = _model(False)
    _steps(model, lambda out: (out.sum(), torch.tensor(2), None))
    assert model.weight.grad.item() == 1.5  # each over its two tokens
    model, config = _model(True)
    seen = []
    config.finalize_model_grads_func = lambda chunks, tokens, **options: seen.append((chunks, int(tokens), options))
    config.grad_scale_func = lambda loss: loss * 10
    _steps(model, lambda out: (out.sum(), torch.tensor(2), None), force_all_reduce=True)
    assert model.weight.grad.item() == 90.0
    assert seen == [([model], 6, {"pg_collection": None, "force_all_reduce": True})]


def test_all_micro_batches_but_the_last_keep_gradients_local():
    model, config = _model(False)
    entered = []

    @contextmanager
    def no_sync():
        entered.append(model.weight.grad is None)
        yield

    config.no_sync_func = no_sync
    _steps(model, lambda out: (out.sum(), None))
    assert entered == [True, False]
    entered.clear()
    assert _steps(model, lambda out: (out.sum(), "report"), forward_only=True) == ["report"] * 3
    assert (
        _steps(model, lambda out, non_loss_data: out.item(), forward_only=True, collect_non_loss_data=True)[2] == 6.0
    )
    assert not entered


def test_what_a_schedule_of_one_stage_refuses():
    model, _ = _model(True)
    assert get_forward_backward_func(2) is forward_backward_pipelining_without_interleaving
    with pytest.raises(ConfigError, match="returned no number of tokens"):
        _steps(model, lambda out: (out.sum(), None))
    with pytest.raises(ParallelConfigError, match="model is a list of 2"):
        _steps([model, model], None)


@on_ranks(2)
def test_a_wrapper_reduces_once_a_step_by_default() -> None:
    parallel_state.initialize_model_parallel()
    rank = parallel_state.get_data_parallel_rank()
    inner, config = _model(False)
    model = wrap_model(inner, config, DistributedDataParallelConfig(overlap_grad_reduce=True))
    config.finalize_model_grads_func = finalize_model_grads
    _steps(model, lambda out: (out.sum() * (rank + 1), None))
    assert inner.weight.main_grad.item() == 4.5  # the mean of 3 and 6


def test_a_collection_lists_stand_ins_of_groups_too():
    groups = ProcessGroupCollection(tp=SimpleNamespace(size=lambda: 2))
    assert repr(groups) == "ProcessGroupCollection(tp: 2 ranks)"


def test_parallel_state_too_early_is_megatrons_assertion():
    with pytest.raises(AssertionError, match="initialize_model_parallel"):
        parallel_state.get_tensor_model_parallel_group()


def test_absent_functions_import_and_raise_when_called():
    from core.utils import make_tp_sharded_tensor_for_checkpoint

    with pytest.raises(NotImplementedError, match=r"shardstack.utils has no make_tp_sharded.*: use shardstack.dist_"):
        make_tp_sharded_tensor_for_checkpoint(None, "weight")


def test_the_root_has_what_megatrons_has():
    import core
    from core import DistributedDataParallel, ModelParallelConfig
    from core.distributed import DistributedDataParallel as Wrapper

    assert ModelParallelConfig is core.model_parallel_config.ModelParallelConfig and DistributedDataParallel is Wrapper
