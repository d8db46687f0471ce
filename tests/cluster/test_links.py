"""Sockets: bounded, loopback or private, and deaf to garbage."""

import contextlib
import os
import re
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from cluster.errors import AddressError, LinkLost, PeerGone
from cluster.links.addresses import check_address
from cluster.links.dealer import DealerLink
from cluster.links.engine_links import EngineLinks
from cluster.links.server import ServerLink
from cluster.links.sockets import LinkLimits, fresh_keys

LIMITS = LinkLimits(max_message_bytes=1 << 20)
TCP = "tcp://127.0.0.1:0"


@pytest.fixture
def links(tmp_path: Path) -> Iterator[EngineLinks]:
    """Front on TCP, back on a Unix socket."""
    links = EngineLinks(TCP, f"ipc://{tmp_path}/back", front_limits=LIMITS, back_limits=LIMITS)
    yield links
    links.close(linger_s=0.0)


def next_from(links: EngineLinks, link: ServerLink, timeout_s: float = 5.0) -> tuple[bytes, bytes]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for peer, frame in link.receive():
            if frame is not None:
                return peer, frame
        links.wait(deadline - time.monotonic())
    raise AssertionError("nothing arrived")


def serve_until(links: EngineLinks, is_done: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Let both sockets live until it is so; what they are sent is thrown away."""
    deadline = time.monotonic() + timeout_s
    while not is_done():
        assert time.monotonic() < deadline, "it does not come to be"
        links.wait(0.01)
        for link in (links.front, links.back):
            list(link.receive())


def refusal_of(links: EngineLinks, dealer: DealerLink) -> str:
    """Why a dealer is not let in, when both sides know."""
    before = links.front.num_turned_away

    def is_refused() -> bool:
        with contextlib.suppress(LinkLost):
            assert dealer.take() is None
        return dealer.why_not != "" and links.front.num_turned_away > before

    dealer.send(b"let me in")
    serve_until(links, is_refused)
    return dealer.why_not


def next_departed(links: EngineLinks, link: ServerLink, timeout_s: float = 5.0) -> bytes:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for peer, frame in link.receive():
            if frame is None:
                return peer
        links.wait(deadline - time.monotonic())
    raise AssertionError("nobody left")


def send_until_refused(links: EngineLinks, peer: bytes, frame: bytes, pause_s: float = 0.0) -> None:
    """The socket learns that a peer left a moment after its monitor does."""
    for _ in range(10_000):
        links.back.send(peer, frame)
        links.wait(pause_s)


@pytest.mark.parametrize("side", ["front", "back"])
def test_frames_pass_both_ways_on_both_kinds_of_socket(links: EngineLinks, side: str) -> None:
    link: ServerLink = getattr(links, side)
    with DealerLink(link.address, LIMITS) as dealer:
        dealer.wait_connected(5.0)
        dealer.send(b"hello")
        peer, frame = next_from(links, link)
        link.send(peer, b"welcome")

        assert frame == b"hello"
        assert dealer.receive(5.0) == b"welcome"
        assert dealer.receive(0.0) is None


def test_port_0_publishes_the_port_that_was_given(links: EngineLinks) -> None:
    host, port = links.front.address.removeprefix("tcp://").split(":")
    assert host == "127.0.0.1"
    assert int(port) > 0


def test_a_unix_socket_is_for_its_owner_alone(links: EngineLinks) -> None:
    mode = os.stat(links.back.address.removeprefix("ipc://")).st_mode
    assert stat.S_IMODE(mode) & 0o077 == 0


def test_a_port_in_use_is_refused_with_the_way_out(links: EngineLinks, tmp_path: Path) -> None:
    with pytest.raises(AddressError, match=r"in use by another process.*port 0"):
        EngineLinks(
            links.front.address,
            f"ipc://{tmp_path}/other",
            front_limits=LIMITS,
            back_limits=LIMITS,
        )


def test_the_file_of_a_unix_socket_goes_with_it_but_not_one_that_another_has_bound(
    tmp_path: Path,
) -> None:
    back = f"ipc://{tmp_path}/back"
    first = EngineLinks(TCP, back, front_limits=LIMITS, back_limits=LIMITS)
    (tmp_path / "back").unlink()
    second = EngineLinks(TCP, back, front_limits=LIMITS, back_limits=LIMITS)
    first.close(linger_s=0.0)
    assert (tmp_path / "back").is_socket()
    second.close(linger_s=0.0)
    assert list(tmp_path.iterdir()) == []


def test_a_unix_socket_in_use_is_not_stolen(links: EngineLinks) -> None:
    with pytest.raises(AddressError, match="in use by another process"):
        EngineLinks(TCP, links.back.address, front_limits=LIMITS, back_limits=LIMITS)


def test_a_unix_socket_that_a_dead_process_left_is_used_again(tmp_path: Path) -> None:
    path = tmp_path / "left"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    links = EngineLinks(TCP, f"ipc://{path}", front_limits=LIMITS, back_limits=LIMITS)
    links.close(linger_s=0.0)


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("ipc://" + "/x" * 60, "has 120 bytes; Unix sockets allow 107"),
        ("tcp://127.0.0.1", "tcp://HOST:PORT"),
        ("tcp://127.0.0.1:99999", "tcp://HOST:PORT"),
        ("tcp://:80x", "tcp://HOST:PORT"),
        ("udp://127.0.0.1:1", "starts with ipc:// or tcp://"),
        ("ipc://", "starts with ipc:// or tcp://"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_before_anything_is_opened(
    address: str, complaint: str
) -> None:
    with pytest.raises(AddressError, match=complaint):
        check_address(address)


def test_a_directory_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(AddressError, match=r"directory of the socket .* does not exist"):
        EngineLinks(TCP, f"ipc://{tmp_path}/no/back", front_limits=LIMITS, back_limits=LIMITS)


def test_an_address_of_another_machine_cannot_be_bound(tmp_path: Path) -> None:
    with pytest.raises(AddressError, match="not an address of this machine"):
        EngineLinks(
            "tcp://192.0.2.1:0", f"ipc://{tmp_path}/b", front_limits=LIMITS, back_limits=LIMITS
        )


def test_a_peer_that_left_is_reported_to_whoever_sends_to_it(links: EngineLinks) -> None:
    dealer = DealerLink(links.back.address, LIMITS)
    dealer.send(b"hello")
    peer, _ = next_from(links, links.back)
    dealer.close()
    assert next_departed(links, links.back) == peer

    with pytest.raises(PeerGone, match="has left"):
        send_until_refused(links, peer, b"plan", pause_s=0.01)


@pytest.mark.parametrize("side", ["front", "back"])
def test_it_is_known_at_once_which_peer_left(links: EngineLinks, side: str) -> None:
    link: ServerLink = getattr(links, side)
    dealers = [DealerLink(link.address, LIMITS) for _ in range(5)]
    peers = []
    for dealer in dealers:
        dealer.send(b"hello")
        peers.append(next_from(links, link)[0])
    for number in (3, 0, 4):
        dealers[number].close()
        assert next_departed(links, link) == peers[number]
        dealers[number] = DealerLink(link.address, LIMITS)  # takes the descriptor again
        dealers[number].send(b"hello")
        peers[number] = next_from(links, link)[0]
    for dealer in dealers:
        dealer.close()


def test_the_last_words_of_a_peer_come_before_its_end(links: EngineLinks) -> None:
    heard: list[bytes | None] = []
    for _ in range(20):
        dealer = DealerLink(links.back.address, LIMITS)
        dealer.send(b"hello")
        peer, _ = next_from(links, links.back)
        for number in range(600):  # more than one turn's worth
            dealer.send(b"%d" % number)
        dealer.close(linger_s=5.0)
        heard.clear()
        while None not in heard:
            links.wait(5.0)
            heard += [frame for owner, frame in links.back.receive() if owner == peer]
        assert heard == [*(b"%d" % number for number in range(600)), None]
    assert links.back._known == set()
    assert links.back._peer_by_fd == {}


def test_who_has_left_before_it_is_heard_is_heard_and_has_left(links: EngineLinks) -> None:
    for _ in range(3):
        dealer = DealerLink(links.back.address, LIMITS)
        dealer.send(b"hello")
        dealer.wait_connected(5.0)
        dealer.close(linger_s=5.0)
        deadline = time.monotonic() + 5.0
        heard: list[bytes | None] = []
        while None not in heard and time.monotonic() < deadline:
            links.wait(0.1)
            heard += [frame for _, frame in links.back.receive()]
        assert heard == [b"hello", None]
        assert links.back._known == set()


class PlayedEvents:
    """What a socket's monitor tells, in the place of the monitor."""

    def __init__(self) -> None:
        self._told: list[list[bytes]] = []

    def tell(self, event: int, fd: int) -> None:
        self._told.append([struct.pack("=HI", event, fd), b"address"])

    def poll(self, timeout_ms: int) -> int:
        return len(self._told)

    def recv_multipart(self, flags: int) -> list[bytes]:
        return self._told.pop(0)


class NameOn:
    """The frame that names a peer, come over the connection with this descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def get(self, what: int) -> int:
        assert what == zmq.SRCFD
        return self._fd


def test_who_gets_the_descriptor_of_one_that_left_in_the_same_turn_has_not_left(
    links: EngineLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the engine is at a message of a turn, a peer leaves and another one comes."""
    link, events = links.back, PlayedEvents()
    with monkeypatch.context() as patch:
        patch.setattr(link, "_monitor", events)
        events.tell(zmq.EVENT_ACCEPTED, 7)
        link._note_peer(b"first", NameOn(7))  # type: ignore[arg-type]  # it looks like one
        events.tell(zmq.EVENT_DISCONNECTED, 7)
        events.tell(zmq.EVENT_ACCEPTED, 7)
        link._note_peer(b"second", NameOn(7))  # type: ignore[arg-type]  # it looks like one
        link._read_events()
    assert link._leaving == [b"first"]
    assert link._peer_by_fd == {7: b"second"}


def test_a_peer_that_does_not_read_is_cut_off_and_the_others_are_not(tmp_path: Path) -> None:
    few = LinkLimits(queue_messages=10)
    links = EngineLinks(TCP, f"ipc://{tmp_path}/b", front_limits=few, back_limits=few)
    with DealerLink(links.back.address, few) as slow, DealerLink(links.back.address, few) as good:
        slow.send(b"slow")
        slow_peer, _ = next_from(links, links.back)
        good.send(b"good")
        good_peer, _ = next_from(links, links.back)

        with pytest.raises(PeerGone, match="reads too slowly"):
            send_until_refused(links, slow_peer, b"x" * 10_000)

        links.back.send(good_peer, b"still here")
        assert good.receive(5.0) == b"still here"
    links.close(linger_s=0.0)


def test_a_stranger_cannot_be_sent_to(links: EngineLinks) -> None:
    with pytest.raises(PeerGone):
        links.front.send(b"nobody", b"x")


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 400, b""])
def test_bytes_that_are_not_zeromq_at_all_change_nothing(links: EngineLinks, data: bytes) -> None:
    host, port = links.front.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(data)
    with DealerLink(links.front.address, LIMITS) as dealer:
        dealer.send(b"hello")
        assert next_from(links, links.front)[1] == b"hello"


def test_an_oversized_frame_is_never_delivered_and_ends_its_connection(links: EngineLinks) -> None:
    with DealerLink(links.front.address, LinkLimits(max_message_bytes=100 << 20)) as big:
        big.wait_connected(5.0)
        big.send(b"x" * (100 << 20))
        with pytest.raises(LinkLost):
            big.receive(5.0)
    assert list(links.front.receive()) == []
    with DealerLink(links.front.address, LIMITS) as dealer:
        dealer.send(b"hello")
        assert next_from(links, links.front)[1] == b"hello"


def test_messages_of_several_frames_are_dropped_and_counted(links: EngineLinks) -> None:
    with DealerLink(links.front.address, LIMITS) as dealer:
        dealer._socket.send_multipart([b"a", b"b"])
        dealer.send(b"hello")
        assert next_from(links, links.front)[1] == b"hello"
    assert links.front.num_malformed == 1


def test_the_end_of_the_engine_is_noticed_after_its_last_words(tmp_path: Path) -> None:
    links = EngineLinks(TCP, f"ipc://{tmp_path}/b", front_limits=LIMITS, back_limits=LIMITS)
    with DealerLink(links.back.address, LIMITS) as dealer:
        dealer.send(b"hello")
        peer, _ = next_from(links, links.back)
        links.back.send(peer, b"stop")
        links.close(linger_s=1.0)

        assert dealer.receive(5.0) == b"stop"
        with pytest.raises(LinkLost, match="ended"):
            dealer.receive(5.0)


def test_nobody_at_the_address_is_said_in_time(tmp_path: Path) -> None:
    with (
        DealerLink(f"ipc://{tmp_path}/nobody", LIMITS) as dealer,
        pytest.raises(LinkLost, match=r"nobody answers .* within 0\.05 s"),
    ):
        dealer.wait_connected(0.05)


def test_a_worker_may_dial_before_the_engine_listens(tmp_path: Path) -> None:
    with DealerLink(f"ipc://{tmp_path}/b", LIMITS) as dealer:
        dealer.send(b"early")
        links = EngineLinks(TCP, f"ipc://{tmp_path}/b", front_limits=LIMITS, back_limits=LIMITS)
        assert next_from(links, links.back)[1] == b"early"
        links.close(linger_s=0.0)


def test_waiting_returns_when_a_descriptor_is_readable(links: EngineLinks) -> None:
    reader, writer = os.pipe()
    try:
        with DealerLink(links.back.address, LIMITS) as dealer:
            os.write(writer, b"!")
            assert dealer.wait(5.0, [reader]) == {reader}
    finally:
        os.close(reader)
        os.close(writer)


def test_an_encrypted_socket_answers_holders_of_its_own_keys_only() -> None:
    front, back = fresh_keys(), fresh_keys()
    links = EngineLinks(
        TCP,
        TCP,
        front_limits=LIMITS,
        back_limits=LIMITS,
        front_keys=front.server,
        back_keys=back.server,
    )
    unlike = {
        "refuses our key": msgspec.structs.replace(back.client, server=front.client.server),
        "hangs up in the handshake": back.client,
        "without a key": None,
    }
    try:
        with DealerLink(links.front.address, LIMITS, front.client) as friend:
            friend.send(b"hello")
            assert next_from(links, links.front)[1] == b"hello"
            friend.wait_connected(5.0)
            for number, (why, keys) in enumerate(unlike.items(), 1):
                with DealerLink(links.front.address, LIMITS, keys) as stranger:
                    assert why in refusal_of(links, stranger)
                assert links.front.num_turned_away >= number
            friend.send(b"still here")
            assert next_from(links, links.front)[1] == b"still here"
        assert links.back.num_turned_away == 0
    finally:
        links.close(linger_s=0.0)


def test_a_key_at_a_plain_socket_is_said_to_be_useless(links: EngineLinks) -> None:
    with DealerLink(links.front.address, LIMITS, fresh_keys().client) as dealer:
        # Whether the greeting is read before the connection ends is chance.
        told = "does not encrypt, and was dialled with a key|hangs up in the handshake"
        with pytest.raises(LinkLost, match=told):
            dealer.wait_connected(5.0)
        assert re.search(told, dealer.why_not)


def test_a_thousand_connections_that_end_at_once_are_counted(links: EngineLinks) -> None:
    host, port = links.front.address.removeprefix("tcp://").split(":")
    for _ in range(1000):
        socket.create_connection((host, int(port)), 5.0).close()
    serve_until(links, lambda: links.front.num_turned_away == 1000)
