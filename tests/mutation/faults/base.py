"""Faults of `core.base`."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

_NAMES = "tests/unit/base/test_second_name.py"
_RECOMPUTATION = "tests/unit/base/test_recomputation.py"

MUTATIONS = (
    Mutation(
        "sums of a global batch wait for its end, and are added there",
        "core.base.micro_batch_tree.MicroBatchTree.additions",
        r"return \(~.*",
        "return 0",
        ("tests/unit/base/test_micro_batch_tree.py",),
    ),
    Mutation(
        "host memory is lent again while a view of it lives",
        "core.base.host_memory.LentMemory.take",
        r"part\[2\]\(\) is not None",
        "part[2] is None",
        ("tests/unit/base/test_host_memory.py::test_memory_is_lent_again_once_nothing_refers_to_it",),
    ),
    Mutation(
        "adapters of PEFT start as layers where the model was on meta",
        "core.base.foreign_initialization._resets",
        r"adapters, name, True\) for name in foreign\.module\.r\]",
        "adapters, name, True) for name in ()]",
        ("tests/unit/distributed/test_hugging_face_experts.py::test_adapters_train_next_to_experts_over_ranks",),
    ),
    Mutation(
        "a recomputation writes the buffers again",
        "core.base.recomputation.RecordedForward.replaying",
        r"held\.update\(buffers\)",
        "pass",
        (_RECOMPUTATION,),
    ),
    Mutation(
        "a recomputation reads the buffers of now",
        "core.base.recomputation.RecordedForward.replaying",
        r"held\.update\(_copied\(values, copies\)\)",
        "pass",
        (_RECOMPUTATION,),
    ),
    Mutation(
        "a recomputation does not know of statistics that a kernel writes",
        "core.base.recomputation.RecordedForward.recording",
        r"_is_code\(value\)",
        "True",
        (_RECOMPUTATION,),
    ),
    Mutation(
        "a recomputation notes anew",
        "core.base.recomputation.noted",
        r"make\(\) if _replayed is None else next\(_replayed, None\)",
        "make()",
        (_RECOMPUTATION,),
    ),
    Mutation(
        "an attribute of the module inside counts for the one around it",
        "core.base.module_protocol._of_class",
        r"getattr\(type\(module\), ",
        "getattr(module, ",
        ("tests/unit/base/test_module_protocol.py",),
    ),
    Mutation(
        "a model is looked at once, and not where it has changed",
        "core.base.module_protocol.ModelContents.have_changed",
        r"return .*",
        "return not self._modules",
        ("tests/unit/distributed/guards/test_changed_models.py::test_a_replaced_parameter_is_named_at_the_next_sync",),
    ),
    Mutation(
        "a module keeps the spec of its second name",
        "core.base.second_name._SharedModules.exec_module",
        r"module\.__spec__ = .*",
        "pass",
        (_NAMES,),
    ),
    Mutation(
        "an import by the second name binds over a function",
        "core.base.second_name._SharedModules.exec_module",
        r"sys\.modules\[_SECOND \+ .*",
        "pass",
        (_NAMES,),
    ),
    Mutation(
        "another project's core is taken for this package",
        "core.base.second_name._own_name",
        r" or \(sys\.modules.*core_is_ours",
        "",
        (_NAMES,),
    ),
    Mutation(
        "compiled code computes addends of gradients in lent memory too",
        "core.base._torch_compat.replace_returned",
        r"all\(\(?u\.op == 'output' for u in V\.graph\.current_node\.users\)?\)",
        "True",
        ("tests/unit/tensor_parallel/test_weight_gradients.py::test_compiled_addends_are_in_no_lent_memory",),
    ),
)
