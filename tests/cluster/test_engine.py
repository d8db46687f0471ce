"""The engine end to end: real sockets, real scheduler, scripted workers."""

import contextlib
import os
import pickle
import socket
import threading
from pathlib import Path

import msgpack
import pytest

from cluster.errors import LinkLost
from cluster.messages.clients import (
    CancelByLabel,
    Cancelled,
    ClientHello,
    EngineStarting,
    EngineStopping,
    Refusal,
    ServerInfo,
    TokenizerRequest,
)
from cluster.messages.reports import Status, StatusRequest
from cluster.messages.supervisor import (
    GroupLost,
    GroupReady,
    GroupStopped,
    Shutdown,
    StartGroup,
    SupervisorHello,
)
from cluster.messages.workers import WorkerFailed
from cluster.wire import FROM_ENGINE, PROTOCOL_VERSION
from scheduler.journal import Record, encode_record
from scheduler.request import Finish
from tests.cluster.cluster_rig import (
    KEY,
    TOKENIZER,
    Rig,
    group_of,
    wait_for_status,
)
from tests.cluster.scripted import Script, tokens_after


def is_idle(status: Status) -> bool:
    return (
        status.num_running == status.num_waiting == 0
        and sum(group.num_used_blocks for group in status.groups) == 0
    )


def test_a_prompt_goes_in_and_its_tokens_come_out(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.start_worker()
        client = rig.client()
        handle = client.submit(num_prompt=10, max_tokens=7)
        client.finish(handle)

        assert client.tokens[handle] == tokens_after(10, 7)
        assert client.ends[handle] is Finish.LENGTH


@pytest.mark.parametrize("max_plans_in_flight", [1, 2])
def test_many_requests_of_many_clients_each_get_their_own_tokens(
    tmp_path: Path, max_plans_in_flight: int
) -> None:
    with Rig(tmp_path, num_ranks=2, max_plans_in_flight=max_plans_in_flight) as rig:
        rig.start_worker(rank=0)
        rig.start_worker(rank=1)
        clients = [rig.client() for _ in range(4)]
        sent = [
            (client, client.submit(num_prompt=1 + 7 * i, max_tokens=3 + i), 1 + 7 * i, 3 + i)
            for i in range(6)
            for client in clients
        ]
        for client, handle, num_prompt, max_tokens in sent:
            client.finish(handle)
            assert client.tokens[handle] == tokens_after(num_prompt, max_tokens)
        assert is_idle(clients[0].status())


def test_every_rank_gets_the_same_plans(tmp_path: Path) -> None:
    with Rig(tmp_path, num_ranks=3) as rig:
        scripts = [rig.start_worker(rank=rank) for rank in (2, 0, 1)]
        client = rig.client()
        client.finish(client.submit(max_tokens=20))
    plans = [[FROM_ENGINE.encode(plan) for plan in script.plans] for script in scripts]
    assert plans[0]
    assert plans[0] == plans[1] == plans[2]


@pytest.mark.parametrize(("num_stages", "answering"), [(2, 2), (4, 3)])
def test_the_first_rank_of_the_last_stage_answers(
    tmp_path: Path, num_stages: int, answering: int
) -> None:
    with Rig(tmp_path, num_ranks=4, num_stages=num_stages) as rig:
        for rank in range(4):
            rig.start_worker(rank=rank)
        client = rig.client()
        handles = [client.submit(num_prompt=90 + at, max_tokens=5) for at in range(5)]
        client.finish(*handles)
        dropped = client.status().totals.num_dropped

    assert dropped == 0
    for at, handle in enumerate(handles):
        assert client.tokens[handle] == tokens_after(90 + at, 5)


def test_two_plans_are_in_flight(tmp_path: Path) -> None:
    hold = threading.Event()
    with Rig(tmp_path) as rig:
        rig.start_worker(Script(hold=hold))
        client = rig.client()
        handle = client.submit(num_prompt=100, max_tokens=3)
        status = wait_for_status(client, lambda status: status.totals.num_steps == 2)
        assert group_of(status).num_steps == 0  # both sent, none answered
        hold.set()
        client.finish(handle)


def test_a_client_that_comes_early_is_told_to_wait_and_then_that_it_may(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        client = rig.stranger()
        client.send(ClientHello(protocol=PROTOCOL_VERSION))
        assert isinstance(client.next(), EngineStarting)
        assert client.status().state == "starting"
        client.finish(early := client.submit())
        assert client.rejections[early].reason == "no_workers"

        rig.start_worker()
        info = client.next_of(ServerInfo)

        assert (info.vocab_size, info.max_model_len, info.end_ids) == (1000, 256, (2,))
        assert info.tokenizer_digest == TOKENIZER.digest
        assert info.defaults.temperature == 0.5
        assert client.status().state == "serving"


def test_a_client_without_a_directory_gets_the_tokenizer(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.start_worker()
        client = rig.client()
        client.send(TokenizerRequest())
        assert client.next() == TOKENIZER


def test_the_status_tells_ranks_epochs_blocks_and_totals(tmp_path: Path) -> None:
    with Rig(tmp_path, num_ranks=2) as rig:
        rig.start_worker(Script(num_blocks=40), rank=0)
        rig.start_worker(Script(num_blocks=30), rank=1)
        client = rig.client()
        client.finish(*[client.submit(num_prompt=20, max_tokens=4) for _ in range(3)])

        status = client.status()
        group = group_of(status)

        assert (group.epoch, group.state, group.num_blocks) == (1, "ready", 30)
        assert [(rank.state, rank.num_blocks) for rank in group.ranks] == [
            ("ready", 40),
            ("ready", 30),
        ]
        assert all(rank.pid == os.getpid() for rank in group.ranks)
        assert group.num_steps == status.totals.num_steps > 0
        assert group.steps_per_s > 0
        assert status.totals.num_requests == 3
        assert status.totals.prompt_tokens == 60
        assert status.totals.output_tokens == 12
        assert status.totals.finished == {"length": 3}
        assert status.num_clients == 1


def test_an_aborted_request_is_not_heard_of_again_and_its_blocks_come_back(
    tmp_path: Path,
) -> None:
    with Rig(tmp_path) as rig:
        rig.start_worker()
        client = rig.client()
        long = client.submit(max_tokens=240)
        client.read_until(lambda: long in client.tokens)
        client.abort(long, 12345)
        status = wait_for_status(client, is_idle)
        seen = len(client.tokens[long])
        other = client.submit(max_tokens=30)
        client.finish(other)

        assert status.totals.finished == {"abort": 1}
        assert long not in client.ends
        assert len(client.tokens[long]) == seen
        assert client.tokens[other] == tokens_after(4, 30)


def test_a_waiting_request_can_be_aborted_too(tmp_path: Path) -> None:
    hold = threading.Event()
    with Rig(tmp_path, max_num_seqs=1) as rig:
        rig.start_worker(Script(hold=hold))
        client = rig.client()
        running, waiting = client.submit(max_tokens=2), client.submit(max_tokens=2)
        wait_for_status(client, lambda status: status.num_waiting == 1)
        client.abort(waiting)
        wait_for_status(client, lambda status: status.num_waiting == 0)
        hold.set()
        client.finish(running)
        assert waiting not in client.tokens


@pytest.mark.parametrize("state", ["waiting", "running"])
def test_a_client_that_vanishes_takes_its_requests_with_it(tmp_path: Path, state: str) -> None:
    hold = threading.Event()
    with Rig(tmp_path, max_num_seqs=1) as rig:
        rig.start_worker(Script(hold=hold))
        leaver, stayer = rig.client(), rig.client()
        clients = (leaver, stayer) if state == "running" else (stayer, leaver)
        handles = {client: client.submit(max_tokens=200) for client in clients}
        wait_for_status(stayer, lambda status: status.num_running + status.num_waiting == 2)
        leaver.close()
        wait_for_status(stayer, lambda status: status.num_clients == 1)
        hold.set()
        stayer.finish(handles[stayer])

        assert stayer.tokens[handles[stayer]] == tokens_after(4, 200)
        status = wait_for_status(stayer, is_idle)
        assert status.totals.finished == {"abort": 1, "length": 1}
        assert status.totals.output_tokens < 400


def test_a_client_that_does_not_read_is_cut_off_and_told_when_it_reads_again(
    tmp_path: Path,
) -> None:
    with Rig(tmp_path, client_queue=5) as rig:
        rig.start_worker()
        slow, good = rig.client(), rig.client()
        hog = slow.submit(max_tokens=200)
        for _ in range(20_000):
            slow.send(StatusRequest())
            if good.status().totals.num_cut_clients:
                break
        handle = good.submit(max_tokens=5)
        good.finish(handle)

        assert good.tokens[handle] == tokens_after(4, 5)
        assert wait_for_status(good, is_idle).num_clients == 1
        refusal = slow.next_of(Refusal)
        assert refusal.reason in ("too_slow", "no_hello")
        assert hog not in slow.ends or slow.ends[hog] is Finish.LENGTH


def test_a_supervisor_that_comes_late_is_told_what_it_missed(tmp_path: Path) -> None:
    """Workers of a small model may be ready before it has said hello."""
    with Rig(tmp_path, num_groups=2) as rig:
        rig.start_worker(group=0)
        client = rig.client()
        wait_for_status(client, lambda status: status.state == "serving")
        late = rig.supervisor()
        first = late.next_of(GroupReady)
        rig.start_worker(group=1)
        second = late.next_of(GroupReady)

        assert (first.group, second.group) == (0, 1)


def test_requests_are_cancelled_by_their_label_whosever_they_are(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.start_worker(Script(step_s=0.01))
        owner, other = rig.client(), rig.client()
        one = [owner.submit(max_tokens=200, label=f"call-1-{n}") for n in (0, 1)]
        two = owner.submit(max_tokens=200, label="mine-7 call-2b")
        three = owner.submit(max_tokens=50, label="mine-70 call-1a0b")
        owner.read_until(lambda: {*one, two, three} <= owner.tokens.keys())
        counts = {}
        for label in ("", "call", "mine", "-7", "mine-7 ", "call-1", "mine-7", "call-2b"):
            other.send(CancelByLabel(label))
            answer = other.next_of(Cancelled)
            counts[answer.label] = answer.count
        owner.finish(*one, two, three)

        assert {label: count for label, count in counts.items() if count} == {
            "call-1": 2,
            "mine-7": 1,
        }
        assert [owner.ends[handle] for handle in (*one, two)] == [Finish.ABORT] * 3
        assert owner.ends[three] is Finish.LENGTH
        assert not any(owner.messages.values()), "it was not the engine that gave them up"
        wait_for_status(other, is_idle)


class Exploit:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def bad_frames(folder: Path) -> list[bytes]:
    return [
        b"",
        bytes(range(256)),
        pickle.dumps(Exploit(folder / "exploited")),
        b"\x91" * 50_000,
        msgpack.packb({"type": "shell"}),
        msgpack.packb({"type": "request", "handle": "one"}),
        msgpack.packb({"type": "result", "epoch": 1, "step": 1, "token": b"\1"}),
    ]


@pytest.mark.parametrize("side", ["front", "back"])
def test_garbage_is_dropped_and_counted_and_the_engine_lives(tmp_path: Path, side: str) -> None:
    with Rig(tmp_path) as rig:
        rig.start_worker()
        client = rig.client()
        stranger = rig.stranger() if side == "front" else rig.supervisor()
        frames = bad_frames(tmp_path)
        for frame in frames:
            stranger.link.send(frame)
        status = wait_for_status(client, lambda status: status.totals.num_dropped >= len(frames))
        handle = client.submit()
        client.finish(handle)

        assert status.totals.num_dropped == len(frames)
        assert client.tokens[handle] == tokens_after(4, 5)
        assert not (tmp_path / "exploited").exists()


@pytest.mark.parametrize("side", ["front", "back"])
def test_a_frame_of_100_mb_ends_its_connection_only(tmp_path: Path, side: str) -> None:
    with Rig(tmp_path) as rig:
        rig.start_worker()
        client = rig.client()
        stranger = rig.stranger() if side == "front" else rig.supervisor()
        stranger.link.wait_connected(5.0)
        stranger.link.send(b"x" * (100 << 20))
        if side == "front":
            with pytest.raises(LinkLost):
                stranger.link.receive(20.0)
            client.finish(handle := client.submit())
            assert client.tokens[handle] == tokens_after(4, 5)
        else:  # the supervisor is not a stranger: an engine without one ends
            rig.join()


def test_bytes_that_are_not_zeromq_do_not_disturb_a_tcp_socket(tmp_path: Path) -> None:
    with Rig(tmp_path, front_address="tcp://127.0.0.1:0") as rig:
        rig.start_worker()
        host, port = rig.front.removeprefix("tcp://").split(":")
        for data in bad_frames(tmp_path):
            raw = socket.create_connection((host, int(port)))
            with raw, contextlib.suppress(ConnectionError):
                raw.sendall(data * 100)
        client = rig.client()
        client.finish(handle := client.submit())
        assert client.tokens[handle] == tokens_after(4, 5)


def test_a_client_of_another_version_is_told_both_numbers(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        client = rig.stranger()
        client.send(ClientHello(protocol=99))
        refusal = client.next_of(Refusal)
        assert refusal.reason == "protocol"
        assert f"speaks protocol {PROTOCOL_VERSION}, the client 99" in refusal.message


def test_a_worker_of_another_version_is_told_both_numbers(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        stranger = rig.supervisor(key="wrong")
        assert stranger.next_of(Refusal).reason == "stranger"
        stranger.send(SupervisorHello(protocol=99, engine_id="engine", key=KEY))
        refusal = stranger.next_of(Refusal)
        assert f"speaks protocol {PROTOCOL_VERSION}, this peer 99" in refusal.message


def test_a_client_that_never_said_hello_is_told_to(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        client = rig.stranger()
        client.submit()
        assert client.next_of(Refusal).reason == "no_hello"


def test_a_request_with_a_bad_field_is_refused_as_itself(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.start_worker()
        client = rig.client()
        client.link.send(
            msgpack.packb(
                {"type": "request", "handle": 77, "prompt": b"", "sampling": {"top_p": 7.0}}
            )
        )
        client.finish(77)
        assert client.rejections[77].reason == "invalid"
        assert "top_p" in client.rejections[77].message


def test_a_handle_beyond_32_bits_is_refused_as_itself(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.start_worker()
        client = rig.client()
        client.link.send(
            msgpack.packb(
                {"type": "request", "handle": 2**40, "prompt": b"\1\0\0\0", "sampling": {}}
            )
        )
        client.finish(2**40)
        assert "handle must be from 0 to" in client.rejections[2**40].message


def test_one_stranger_cannot_pose_as_a_worker(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.start_worker(key="guessed")
        rig._threads[0].join(20)
        assert rig.exit_codes["0.1.0"] == 0  # refused, and so ended in order
        rig.start_worker()
        assert rig.client().status().state == "serving"


def test_a_rank_that_raises_fails_the_group_as_one_and_is_named_with_its_step(
    tmp_path: Path,
) -> None:
    with Rig(tmp_path, num_ranks=2) as rig:
        rig.start_worker(rank=0)
        rig.start_worker(Script(raise_at_step=5), rank=1)
        supervisor = rig.supervisor()
        client = rig.client()
        handle = client.submit(max_tokens=100)
        client.finish(handle)

        assert client.ends[handle] is Finish.ERROR
        assert (
            "rank 1 of group 0 failed at step 5: RuntimeError: a kernel went wrong"
            in (client.messages[handle])
        )
        lost = supervisor.next_of(GroupLost)
        assert (lost.rank, lost.step, lost.restarts) == (1, 5, False)
        client.finish(late := client.submit())
        assert client.rejections[late].reason == "no_workers"
        assert "a kernel went wrong" in client.rejections[late].message
        assert client.status().state == "failed"
        for thread in rig._threads:
            thread.join(20)
        assert rig.exit_codes == {"0.1.0": 0, "0.1.1": 1}


def test_a_step_that_is_not_answered_in_time_fails_the_group(tmp_path: Path) -> None:
    with Rig(tmp_path, step_timeout_s=0.2) as rig:
        rig.start_worker(Script(hang_at_step=3))
        client = rig.client()
        handle = client.submit(max_tokens=100)
        client.finish(handle)

        assert client.ends[handle] is Finish.ERROR
        assert "step 3 was not answered within step_timeout_s=0.2" in client.messages[handle]


def test_a_worker_that_answers_the_wrong_step_fails_its_group(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.start_worker(Script(wrong_step=True))
        client = rig.client()
        handle = client.submit()
        client.finish(handle)
        assert client.rejections[handle].reason == "no_workers"
        assert "answered step 2, expected 1" in client.rejections[handle].message


def test_a_death_that_the_supervisor_reports_fails_the_group(tmp_path: Path) -> None:
    hold = threading.Event()
    with Rig(tmp_path) as rig:
        rig.start_worker(Script(hold=hold))
        supervisor, client = rig.supervisor(), rig.client()
        handle = client.submit()
        wait_for_status(client, lambda status: status.num_running == 1)
        supervisor.send(WorkerFailed(group=0, epoch=1, rank=0, message="was ended by SIGKILL"))
        client.finish(handle)
        assert client.rejections[handle].reason == "no_workers"
        assert "SIGKILL" in client.rejections[handle].message


def test_news_of_an_older_epoch_or_of_no_group_changes_nothing(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.start_worker()
        supervisor, client = rig.supervisor(), rig.client()
        for group, epoch in ((0, 0), (9, 1)):
            supervisor.send(WorkerFailed(group=group, epoch=epoch, rank=0, message="?"))
            supervisor.send(GroupStopped(group, epoch))
        client.finish(handle := client.submit())
        assert client.tokens[handle] == tokens_after(4, 5)


def test_a_worker_that_fails_to_load_is_reported_with_its_own_words(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        supervisor = rig.supervisor()
        supervisor.link.wait_connected(5.0)
        rig.start_worker(Script(fail_at_load="no such tensor"))
        lost = supervisor.next_of(GroupLost)
        assert (lost.rank, lost.step, lost.message) == (0, 0, "ValueError: no such tensor")


def test_a_lost_group_moves_its_requests_to_another_and_no_token_is_lost(tmp_path: Path) -> None:
    with Rig(tmp_path, num_groups=2) as rig:
        rig.start_worker(Script(raise_at_step=8), group=0)
        rig.start_worker(group=1)
        client = rig.client()
        wait_for_status(client, lambda s: all(g.state == "ready" for g in s.groups))
        handles = [client.submit(num_prompt=5 + i, max_tokens=40) for i in range(6)]
        client.finish(*handles)

        assert [client.tokens[h] for h in handles] == [tokens_after(5 + i, 40) for i in range(6)]
        assert group_of(client.status(), 0).state == "lost"


def test_a_restarted_group_goes_on_where_the_lost_one_was(tmp_path: Path) -> None:
    with Rig(tmp_path, max_restarts=1) as rig:
        rig.start_worker(Script(raise_at_step=8))
        supervisor, client = rig.supervisor(), rig.client()
        handle = client.submit(max_tokens=40)
        assert supervisor.next_of(GroupLost).restarts
        supervisor.send(GroupStopped(0, 1))
        start = supervisor.next_of(StartGroup)
        rig.start_worker(group=start.group, epoch=start.epoch)
        client.finish(handle)

        assert start.epoch == 2
        assert client.tokens[handle] == tokens_after(4, 40)
        assert group_of(client.status()).epoch == 2


def test_a_request_ends_when_its_time_is_over(tmp_path: Path) -> None:
    hold = threading.Event()
    with Rig(tmp_path) as rig:
        rig.start_worker(Script(hold=hold))
        client = rig.client()
        handle = client.submit(timeout_s=0.05)
        client.finish(handle)
        assert client.ends[handle] is Finish.TIMEOUT


def test_a_start_that_takes_too_long_is_lost_with_the_missing_rank(tmp_path: Path) -> None:
    with Rig(tmp_path, num_ranks=2, start_timeout_s=1.0) as rig:
        supervisor = rig.supervisor()
        rig.start_worker(rank=0)
        lost = supervisor.next_of(GroupLost)
        assert lost.rank == 1
        assert "rank 1 has not reached the engine" in lost.message


def test_draining_finishes_what_runs_and_refuses_what_comes(tmp_path: Path) -> None:
    hold = threading.Event()
    with Rig(tmp_path) as rig:
        rig.start_worker(Script(hold=hold))
        supervisor, client = rig.supervisor(), rig.client()
        handle = client.submit(max_tokens=50)
        wait_for_status(client, lambda status: status.num_running == 1)
        supervisor.send(Shutdown(drain_s=60.0, message="rolling update"))
        stopping = client.next_of(EngineStopping)
        late = client.submit()
        client.finish(late)
        hold.set()
        client.finish(handle)
        rig.join()

        assert (stopping.message, stopping.drain_s) == ("rolling update", 60.0)
        assert client.rejections[late].reason == "shutting_down"
        assert client.tokens[handle] == tokens_after(4, 50)
        assert rig.exit_codes == {"0.1.0": 0}


def test_what_a_drain_does_not_finish_ends_with_an_abort(tmp_path: Path) -> None:
    hold = threading.Event()
    with Rig(tmp_path) as rig:
        rig.start_worker(Script(hold=hold))
        supervisor, client = rig.supervisor(), rig.client()
        handle = client.submit(max_tokens=50)
        wait_for_status(client, lambda status: status.num_running == 1)
        supervisor.send(Shutdown(drain_s=0.05))
        client.finish(handle)
        assert client.ends[handle] is Finish.ABORT
        hold.set()


def test_an_engine_without_a_supervisor_ends(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.start_worker()
        client, supervisor = rig.client(), rig.supervisor()
        supervisor.link.wait_connected(5.0)
        client.status()
        supervisor.close()
        assert "supervisor is gone" in client.next_of(EngineStopping).message
        rig.join()


def test_workers_end_themselves_when_the_engine_is_gone(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.start_worker()
    with rig:
        rig.client()
        rig.engine._end = lambda: None  # type: ignore[method-assign]  # no last words
    assert rig.exit_codes == {"0.1.0": 3}


def test_an_idle_engine_waits_for_nothing_but_messages(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.start_worker()
        client = rig.client()
        client.finish(client.submit(timeout_s=1000.0))
        client.status()
        assert rig.engine._idle_wait_s() is None


def test_the_journal_is_a_stream_that_plain_msgpack_reads(tmp_path: Path) -> None:
    records: list[Record] = []
    with Rig(tmp_path, journal=records) as rig:
        rig.start_worker()
        client = rig.client()
        client.finish(client.submit())
    unpacker = msgpack.Unpacker(strict_map_key=False)
    unpacker.feed(b"".join(encode_record(record) for record in records))
    events = [record["event"] for record in unpacker]
    assert events[:3] == ["opened", "group_added", "submitted"]
    assert "planned" in events
    assert "applied" in events


def test_two_thousand_short_requests_leave_nothing_behind(tmp_path: Path) -> None:
    with Rig(tmp_path, max_waiting_requests=300) as rig:
        rig.start_worker()
        for _ in range(4):
            client = rig.client()
            handles = [client.submit(max_tokens=1 + i % 3) for i in range(500)]
            client.abort(*handles[::5])
            client.finish(*[h for i, h in enumerate(handles) if i % 5])
            client.close()
        watcher = rig.client()
        status = wait_for_status(watcher, lambda status: status.num_clients == 1)
        assert is_idle(status)
        engine = rig.engine
        assert engine._groups.scheduler is not None
        assert engine._groups.scheduler.live == {}
        assert len(engine._front.clients) == 1
        assert engine._links.front._known == set(engine._front.clients._number_by_peer)
        assert engine._front._news == []
