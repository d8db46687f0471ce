"""The port of HTTP: bound once, at the address that was asked for and no other. Cases 69, 118."""

import socket
import threading

import pytest

from cluster.errors import AddressError
from cluster.listener import Listener


def can_connect(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        return probe.connect_ex((host, port)) == 0


@pytest.mark.parametrize(
    ("host", "url"), [("127.0.0.1", "http://127.0.0.1"), ("localhost", "http://127.0.0.1")]
)
def test_port_0_publishes_the_port_that_was_given(host: str, url: str) -> None:
    listener = Listener(host, 0)
    assert listener.port > 0
    assert listener.url == f"{url}:{listener.port}"
    assert listener.is_loopback
    listener.close()


def test_case_118_it_is_bound_to_its_host_alone() -> None:
    listener = Listener("127.0.0.2", 0)
    assert can_connect("127.0.0.2", listener.port)
    assert not can_connect("127.0.0.1", listener.port)
    listener.close()
    assert not can_connect("127.0.0.2", listener.port)


def has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            return False
    return True


def test_case_118_an_ipv6_host_works_where_there_is_one_and_is_refused_elsewhere() -> None:
    if not has_ipv6():
        with pytest.raises(AddressError, match="host=::1 is not an address of this machine"):
            Listener("::1", 0)
        return
    listener = Listener("::1", 0)
    assert listener.url == f"http://[::1]:{listener.port}"
    assert listener.is_loopback
    assert can_connect("::1", listener.port)
    assert not can_connect("127.0.0.1", listener.port)
    listener.close()


@pytest.mark.parametrize("host", ["", "0.0.0.0"])
def test_all_addresses_are_not_loopback(host: str) -> None:
    listener = Listener(host, 0)
    assert not listener.is_loopback
    listener.close()


def test_a_port_in_use_is_refused_with_the_way_out() -> None:
    first = Listener("127.0.0.1", 0)
    wanted = rf"port {first.port} of 127.0.0.1 is in use by another process.*--port 0"
    with pytest.raises(AddressError, match=wanted):
        Listener("127.0.0.1", first.port)
    first.close()


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_a_host_that_is_not_ours_is_refused_by_its_name(host: str) -> None:
    with pytest.raises(AddressError, match=f"host={host} is not an address of this machine"):
        Listener(host, 0)


def test_case_69_many_at_once_are_all_given_ports_of_their_own() -> None:
    listeners: list[Listener] = []
    threads = [
        threading.Thread(target=lambda: listeners.append(Listener("127.0.0.1", 0)))
        for _ in range(32)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len({listener.port for listener in listeners}) == 32
    for listener in listeners:
        listener.close()
