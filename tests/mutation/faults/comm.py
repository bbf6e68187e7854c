"""Faults of `core.comm`."""

from __future__ import annotations

from tests.mutation.mutation import Mutation
from tests.mutation.suites import CONTRACT, FLAT, PROGRAMS_ON_STREAMS, STREAMS, STREAMS_OF_LAYERS

_COLLECTIVES = "tests/unit/comm/test_collectives.py"

MUTATIONS = (
    Mutation(
        "what is reduced replaces the micro-batches before it",
        "core.comm.gloo.store",
        r"\.add_\(result, alpha=scale\)",
        ".copy_(result * scale)",
        (_COLLECTIVES, FLAT, CONTRACT),
    ),
    Mutation("a sum that is added is not scaled", "core.comm.gloo.store", ", alpha=scale", "", (_COLLECTIVES, FLAT)),
    Mutation(
        "what is added scales the micro-batches before it again",
        "core.comm.gloo.store",
        r"\.add_\(result, alpha=scale\)",
        ".add_(result).mul_(scale)",
        (_COLLECTIVES, FLAT),
    ),
    Mutation(
        "a collective that is enqueued counts as over",
        "core.comm.call.Collective.is_over",
        r"self\.event\.query\(\)",
        "True",
        ("tests/unit/comm/test_record.py",),
    ),
    # ---- streams
    Mutation(
        "streams: a lane does not wait for what was queued before",
        "core.comm.lane._StreamLane.submit",
        r"self\._stream\.wait_stream\(submitter\)",
        "pass",
        (STREAMS,),
    ),
    Mutation(
        "streams: a lane's event is before its task",
        "core.comm.lane._StreamLane.submit",
        r"task\.execute\(\)\n( +)(return _Recorded\(task, run, submitter, )streams\.record_event\(\)",
        r"done = streams.record_event()\n\1task.execute()\n\1\2done",
        (STREAMS,),
    ),
    Mutation(
        "streams: a lane's event is on the stream that computes",
        "core.comm.lane._StreamLane.submit",
        r"    return _Recorded",
        "return _Recorded",
        (STREAMS,),
    ),
    Mutation(
        "streams: waiting for a lane waits for nothing",
        "core.comm.lane._Recorded.wait",
        r"stream\.wait_event\(self\._event\)",
        "pass",
        (STREAMS,),
    ),
    Mutation(
        "streams: only the stream that asks waits for a lane",
        "core.comm.lane._Recorded.wait",
        r"\{self\._submitter, (streams\.current_stream\(\))\}",
        r"{\1}",
        (f"{PROGRAMS_ON_STREAMS}a_users_stream_averages_the_weights",),
    ),
    Mutation(
        "streams: a lane keeps no memory of its tasks",
        "core.comm.lane._Recorded.__init__",
        r"= run$",
        "= None",
        (STREAMS,),
    ),
    Mutation(
        "streams: a task that raises ends its lane's turn",
        "core.comm.lane._StreamLane.submit",
        r"task\.execute\(\)",
        "(run(), task._end_event.set())",
        (f"{PROGRAMS_ON_STREAMS}an_error_in_a_lane_frees_no_memory_in_use",),
    ),
    Mutation(
        "streams: asynchronous work is not waited for",
        "core.comm.call._RecordedWork.wait",
        r"self\._work\.wait\(\)",
        "pass",
        (STREAMS_OF_LAYERS,),
    ),
    Mutation(
        "streams: a chunk of a copy is read before the device has filled it",
        "core.comm.background_copies._empty",
        r"filled\.synchronize\(\)",
        "pass",
        (f"{PROGRAMS_ON_STREAMS}copies_in_the_background_wait_for_what_is_queued",),
    ),
    Mutation(
        "streams: numbers are read before they are copied",
        "core.comm.lane.HostRead.wait",
        r"wait_for\(self\._event\)",
        "pass",
        ("tests/streams/test_simulation.py::test_an_order_is_accepted",),
    ),
    # ---- messages
    Mutation(
        "a strided tensor is sent as if it were contiguous",
        "core.comm.messages.as_message",
        r"\.contiguous\(\)",
        "",
        ("tests/unit/comm/test_messages.py::test_layouts_do_not_change_values",),
    ),
    Mutation(
        "dtypes that no backend knows are sent as they are",
        "core.comm.messages.as_message",
        r"message\.dtype in _SENT_AS_THEY_ARE",
        "True",
        ("tests/unit/comm/test_messages.py::test_dtypes_that_gloo_does_not_know_travel_as_bytes",),
    ),
    Mutation(
        "what arrives in the place of a strided tensor is not written into it",
        "core.comm.collectives.broadcast_by_backend",
        r"write_back\(tensor, message\)",
        "pass",
        ("tests/unit/comm/test_messages.py::test_layouts_do_not_change_values",),
    ),
    Mutation(
        "a sum over ranks is not written into a strided tensor",
        "core.comm.collectives.all_reduce_by_backend",
        r"write_back\(tensor, message\)",
        "pass",
        ("tests/unit/comm/test_messages.py::test_layouts_do_not_change_values",),
    ),
    Mutation(
        "an expanded tensor keeps what no message fits",
        "core.comm.messages.write_back",
        r"written is not tensor and",
        "False and",
        ("tests/unit/comm/test_messages.py::test_values_that_do_not_fit_an_expanded_tensor_are_refused",),
    ),
    Mutation(
        "a rank that waits for a third one counts as waiting for this one",
        "core.comm.out_of_step._has_begun_any",
        r"wait\[0\] not in own_calls or",
        "wait[0] in own_calls and",
        ("tests/unit/comm/test_out_of_step.py::test_a_chain_of_waiting_ranks_is_waited_for",),
    ),
    Mutation(
        "the scale of a block is that of all blocks of a shard",
        "core.comm.message_formats._to_codes",
        r"values\.aminmax\(dim=1\)",
        "(end.expand(len(values)) for end in values.aminmax())",
        ("tests/unit/comm/test_message_formats.py::test_shards_send_what_one_rank_would",),
    ),
    Mutation(
        "a rank keeps its own part exact where others have what they decoded",
        "core.comm.message_formats.MessageFormat.gather",
        r"self\.decode\(messages, shards\)",
        "(kept := own.clone(), self.decode(messages, shards), own.copy_(kept))",
        ("tests/unit/distributed/test_fewer_bits.py::test_forward_computes_with_what_arrives",),
    ),
    Mutation(
        "messages are added one after the other",
        "core.comm.collectives._add_messages",
        r"is_last or len\(sums\) > rank\.bit_count\(\)",
        "True",
        ("tests/unit/distributed/test_fewer_bits.py::test_gradients_are_sums_of_what_each_rank_sends",),
    ),
)
