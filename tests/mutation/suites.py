"""Tests that catch faults of more than one folder of `core`."""

FLAT = "tests/unit/distributed/flat/test_flat_engine.py"
CONTRACT = "tests/unit/distributed/test_data_parallel_base.py"
SHARDED_STATE = ("tests/unit/optimizer/test_distrib_optimizer.py", "tests/unit/optimizer/test_portable_state.py")
REPRODUCIBLE = "tests/functional/test_reproducible.py::test_a_run_has_the_same_bits_on_any_number_of_ranks"
OUTSIDE_THE_LOOP = (
    "tests/unit/distributed/test_outside_the_loop.py::test_usage_of_a_plain_module_gives_its_result_or_raises"
)
STREAMS = "tests/streams/test_wrappers.py::test_no_operations_of_a_step_race"
STREAMS_OF_LAYERS = "tests/streams/test_wrappers.py::test_no_operations_of_a_composition_race"
PROGRAMS_ON_STREAMS = "tests/streams/test_programs.py::test_"
