"""Messages as bytes: what goes out comes back, and nothing else gets in."""

import os
import pickle
import typing
from collections.abc import Iterable

import msgpack
import msgspec
import numpy as np
import pytest

from cluster import wire
from cluster.errors import WireError
from cluster.frontend.tokenizer_files import TokenizerFiles
from cluster.messages.changes import (
    ClusterUpgraded,
    DrainNode,
    ModelReloaded,
    NodeDrained,
    ReloadModel,
    Scaled,
    ScaleGroups,
    UpgradeCluster,
)
from cluster.messages.clients import (
    AskTurn,
    CancelByLabel,
    Cancelled,
    ClientHello,
    EngineStarting,
    EngineStopping,
    GenerationDefaults,
    Refusal,
    ServerInfo,
    TokenizerRequest,
    YourTurn,
)
from cluster.messages.faults import Fault, FaultInjected, InjectFault
from cluster.messages.reports import (
    Distribution,
    EngineMetrics,
    GroupLoad,
    GroupStatus,
    MetricsRequest,
    RankStatus,
    Sample,
    Status,
    StatusRequest,
    StepNews,
    Totals,
    WatchSteps,
)
from cluster.messages.sockets import FromClient, FromEngine, ToClient, ToEngine
from cluster.messages.supervisor import (
    AvoidNodes,
    BeginUpgrade,
    GroupLost,
    GroupReady,
    GroupsRenewed,
    GroupStopped,
    HandOver,
    Ping,
    Pong,
    RenewGroups,
    RetireGroup,
    Shutdown,
    StartGroup,
    StartPhases,
    SupervisorHello,
    UpgradeNews,
    UseModel,
)
from cluster.messages.workers import (
    MayLoad,
    NodeFacts,
    PoolSize,
    RankCapacity,
    RankPhase,
    Stop,
    WorkerFailed,
    WorkerGreeting,
    WorkerHello,
    WorkerLease,
    WorkerReady,
)
from scheduler.arrays import int32
from scheduler.plan import Admission, LogprobRows, StepPlan, StepResult
from scheduler.request import Abort, Ended, Rejection, Request, Started, Suspected, TokenBatch
from scheduler.sampling import SamplingParams

CAPACITY = RankCapacity(num_blocks=9, block_bytes=4, vocab_size=100, max_model_len=64)
ROWS = LogprobRows(
    row=int32([0]),
    position=int32([3]),
    width=2,
    token=int32([5, 6]),
    logprob=np.asarray([-0.5, -1.5], dtype=np.float32),
    rank=int32([1]),
)

FROM_CLIENT = (
    ClientHello(protocol=1, label="me"),
    TokenizerRequest(),
    AskTurn(7),
    StatusRequest(),
    MetricsRequest(),
    CancelByLabel("cmpl-1"),
    ScaleGroups(3),
    InjectFault(fault=Fault(kind="slow", step=3, seconds=0.5), group=1, rank=0),
    Request(
        handle=7,
        prompt=int32([1, 2, 3]),
        sampling=SamplingParams(max_tokens=5, logit_bias={3: 1.0}, stop=["x"], seed=9),
        end_ids=(2,),
        cache_salt="salt",
        timeout_s=3.5,
    ),
    Abort(int32([7, 8])),
    WatchSteps(True),
    DrainNode("n1", undo=True),
    UpgradeCluster(only_asks=True),
    ReloadModel(model="m", only_asks=True),
)
TO_CLIENT = (
    ServerInfo(
        protocol=1,
        engine_id="e",
        model="m",
        max_model_len=64,
        vocab_size=100,
        block_size=16,
        max_num_seqs=4,
        end_ids=(2,),
        defaults=GenerationDefaults(temperature=0.5, top_k=3),
    ),
    EngineStarting(message="loading"),
    EngineStopping(message="bye", drain_s=2.0),
    Refusal(reason="protocol", message="no"),
    TokenizerFiles(tokenizer_json=b"{}", chat_templates={"default": "x"}),
    TokenBatch(
        handle=int32([1, 2]),
        count=int32([1, 2]),
        token=int32([9, 8, 7]),
        finish=np.asarray([0, 2], dtype=np.uint8),
        started=(Started(handle=1, num_cached_tokens=16),),
        ended=(Ended(handle=2, num_preemptions=1),),
        suspected=(Suspected(handle=1, deaths=("rank 0 died",)),),
        logprobs=ROWS,
    ),
    Cancelled("cmpl-1", 2),
    Scaled(num_groups=3, is_automatic=True, refusal="no room"),
    FaultInjected(ranks=((1, 0),)),
    ModelReloaded(model_dir="/m", is_running=True, num_groups=2, num_done=1),
    ClusterUpgraded(phase="renew", failure="no", num_done=1, refusal="no"),
    NodeDrained(nodes=("n1",), num_leaving=2, waits_for="a group", refusal="no"),
    Rejection(handle=1, reason="queue_full", message="full", retry_after_s=1.5),
    YourTurn(7),
    Status(
        engine_id="e",
        model="m",
        state="serving",
        uptime_s=1.0,
        groups=(
            GroupStatus(
                group=0, epoch=1, state="ready", ranks=(RankStatus(rank=0, state="ready"),)
            ),
        ),
        totals=Totals(finished={"stop": 3}, num_steps=4),
    ),
    EngineMetrics(
        model="m",
        values={"steps": (Sample(("mixed",), 3.0),)},
        distributions={"request_seconds": (Distribution((), (0, 2, 1), 4.5),)},
    ),
    StepNews(
        uptime_s=5.0,
        num_waiting=1,
        groups=(GroupLoad(group=0, num_running=2, num_blocks=8),),
        group=int32([0]),
        step=int32([4]),
        age_s=np.asarray([0.25], dtype=np.float32),
        decode_tokens=int32([2]),
    ),
)
PHASE = RankPhase(group=0, epoch=1, rank=1, node="n2", phase="load", done=1, total=2)
TO_ENGINE = (
    WorkerGreeting(
        protocol=1,
        engine_id="e",
        key="k",
        group=0,
        epoch=1,
        rank=1,
        facts=NodeFacts(node="n2", python="3.11.7", model_digest="ab"),
    ),
    PHASE,
    WorkerHello(protocol=1, engine_id="e", key="k", group=0, epoch=1, rank=1, capacity=CAPACITY),
    WorkerReady(),
    WorkerLease(protocol=1, engine_id="e", key="k", group=1, epoch=2, rank=3),
    WorkerFailed(group=0, epoch=1, rank=1, step=5, message="boom"),
    StepResult(epoch=1, step=2, token=int32([4]), logprobs=ROWS, compute_s=0.5),
    SupervisorHello(protocol=1, engine_id="e", key="k"),
    Ping(),
    GroupStopped(0, 1),
    StartPhases({"plan": 0.5, "load": 1.5}),
    Shutdown(drain_s=1.0),
    UpgradeNews(phase="servers", num_done=2),
    HandOver(),
    RenewGroups(),
)
FROM_ENGINE = (
    MayLoad(),
    PHASE,
    Fault(kind="kill", after_s=0.5),
    PoolSize(8),
    StepPlan(
        epoch=1,
        step=2,
        admitted=(Admission(slot=0, sampling=SamplingParams(), num_prompt=3, blocks=int32([4])),),
        slot=int32([0]),
        start=int32([0]),
        count=int32([3]),
        samples=np.asarray([True]),
        given=int32([3]),
        token=int32([1, 2, 3]),
    ),
    Stop("done"),
    Refusal(reason="protocol", message="no"),
    AvoidNodes(("n1",)),
    BeginUpgrade(),
    GroupsRenewed("no room"),
    UseModel("/m"),
    StartGroup(0, 2),
    RetireGroup(0, 2),
    Pong(),
    GroupReady(group=0, epoch=1, num_blocks=8),
    GroupLost(group=0, epoch=1, message="rank 1 died", rank=1, step=5, restarts=True),
)
CHANNELS = (
    (wire.FROM_CLIENT, FromClient, FROM_CLIENT),
    (wire.TO_CLIENT, ToClient, TO_CLIENT),
    (wire.TO_ENGINE, ToEngine, TO_ENGINE),
    (wire.FROM_ENGINE, FromEngine, FROM_ENGINE),
)
EACH = [
    pytest.param(channel, message, id=f"{type(message).__name__} {channel.name}")
    for channel, _, examples in CHANNELS
    for message in examples
]


@pytest.mark.parametrize(("channel", "union", "examples"), CHANNELS)
def test_every_message_of_a_channel_has_an_example_here(
    channel: wire.Channel[object], union: object, examples: Iterable[object]
) -> None:
    assert {type(message) for message in examples} == set(typing.get_args(union))


@pytest.mark.parametrize(("channel", "message"), EACH)
def test_a_message_comes_back_as_it_went(
    channel: wire.Channel[object], message: msgspec.Struct
) -> None:
    back = channel.decode(channel.encode(message))

    assert type(back) is type(message)
    assert channel.encode(back) == channel.encode(message)


@pytest.mark.parametrize(("channel", "message"), EACH)
def test_the_independent_msgpack_package_reads_every_message(
    channel: wire.Channel[object], message: msgspec.Struct
) -> None:
    read = msgpack.unpackb(channel.encode(message), strict_map_key=False)

    assert read["type"] == message.__struct_config__.tag
    for name, value in read.items():
        own = getattr(message, name, None)
        if isinstance(own, np.ndarray):
            assert np.array_equal(np.frombuffer(value, own.dtype.newbyteorder("<")), own)


def test_what_msgpack_writes_is_read_as_our_message() -> None:
    prompt = np.asarray([1, 2, 3], dtype="<i4").tobytes()
    frame = msgpack.packb(
        {"type": "request", "handle": 1, "prompt": prompt, "sampling": {"max_tokens": 4}}
    )

    request = wire.FROM_CLIENT.decode(frame)

    assert isinstance(request, Request)
    assert request.prompt.tolist() == [1, 2, 3]
    assert request.sampling.max_tokens == 4


class Exploit:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("/tmp/stoker-was-exploited",)


BAD_FRAMES = {
    "nothing": b"",
    "an empty map": b"\x80",
    "noise": bytes(range(256)),
    "a pickle": pickle.dumps(Exploit()),
    "nesting without end": b"\x91" * 100_000,
    "a map that claims four billion entries": b"\xdf\xff\xff\xff\xff",
    "an unknown type": msgpack.packb({"type": "shell", "command": "ls"}),
    "a message of the other direction": wire.TO_CLIENT.encode(FROM_ENGINE[3]),
    "a missing field": msgpack.packb({"type": "request"}),
    "a column of half a number": msgpack.packb({"type": "abort", "handle": b"\1\2\3"}),
    "a column that is text": msgpack.packb({"type": "abort", "handle": "1"}),
    "a field out of range": msgpack.packb(
        {"type": "request", "handle": 1, "prompt": b"", "sampling": {"top_p": 2.0}}
    ),
    "something after the message": wire.FROM_CLIENT.encode(FROM_CLIENT[1]) + b"\0",
}


@pytest.mark.parametrize("frame", BAD_FRAMES.values(), ids=BAD_FRAMES.keys())
@pytest.mark.parametrize("channel", [wire.FROM_CLIENT, wire.TO_ENGINE])
def test_anything_else_is_a_wire_error_and_runs_nothing(
    channel: wire.Channel[object], frame: bytes
) -> None:
    with pytest.raises(WireError, match="not a message from"):
        channel.decode(frame)
    assert not os.path.exists("/tmp/stoker-was-exploited")


def test_an_error_names_the_field_and_what_is_wrong_with_it() -> None:
    frame = BAD_FRAMES["a field out of range"]

    with pytest.raises(WireError, match=r"top_p must be .*2\.0.*\$\.sampling"):
        wire.FROM_CLIENT.decode(frame)


def test_the_handle_of_a_request_that_cannot_be_read_is_still_found() -> None:
    assert wire.handle_of(BAD_FRAMES["a field out of range"]) == 1
    assert wire.handle_of(BAD_FRAMES["a missing field"]) is None
    assert wire.handle_of(BAD_FRAMES["noise"]) is None


def test_a_message_over_the_limit_is_refused_at_both_ends() -> None:
    prompt = np.zeros(wire.FROM_CLIENT.max_bytes // 4 + 1, dtype=np.int32)
    request = Request(handle=1, prompt=prompt, sampling=SamplingParams())

    with pytest.raises(WireError, match=r"Request of 16777.* over the limit of 16777216 bytes"):
        wire.FROM_CLIENT.encode(request)
    with pytest.raises(WireError, match="over the limit"):
        wire.FROM_CLIENT.decode(b"\0" * (wire.FROM_CLIENT.max_bytes + 1))


def test_a_steady_decode_step_of_256_sequences_is_under_4_kib() -> None:
    slots = np.arange(256, dtype=np.int32)
    plan = StepPlan(
        epoch=3, step=1000, slot=slots, start=slots + 2000, block=slots[:16], block_slot=slots[:16]
    )
    result = StepResult(epoch=3, step=1000, token=slots + 40_000, compute_s=0.01)

    assert len(wire.FROM_ENGINE.encode(plan)) + len(wire.TO_ENGINE.encode(result)) < 4096
