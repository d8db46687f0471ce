"""Under which address a node is reached, and what its workers get from the first host."""

import os

import pytest

from cluster.config import add_environment, environment_for_workers
from cluster.errors import AddressError
from cluster.node_address import choose_address, interface_of

INTERFACES = {
    "lo": ("127.0.0.1", "::1"),
    "eth0": ("10.0.0.7",),
    "ib0": ("192.168.5.7", "fd00::7"),
}


def chosen(address: str = "", interface: str = "") -> str:
    return choose_address(
        "10.0.0.7", address=address, interface=interface, addresses_by_interface=INTERFACES
    )


def test_case_103_a_node_is_reached_where_ray_knows_it_unless_it_says_otherwise() -> None:
    assert chosen() == "10.0.0.7"
    assert chosen(address="192.168.5.7") == "192.168.5.7"
    assert chosen(address="fd00::7") == "fd00::7"
    assert chosen(interface="ib0") == "192.168.5.7"
    assert chosen(address="10.0.0.7", interface="ib0") == "10.0.0.7"


def test_an_interface_that_has_the_known_address_changes_nothing() -> None:
    assert chosen(interface="ib0,eth0") == "10.0.0.7"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"address": "10.0.0.8"}, r"STOKER_NODE_ADDRESS=10\.0\.0\.8 is no address of this host"),
        ({"interface": "eth1"}, "GLOO_SOCKET_IFNAME=eth1 names no interface of this host, which"),
        ({"interface": "^lo"}, r"a name, not one of NCCL's patterns"),
    ],
)
def test_case_103_an_address_that_a_node_does_not_have_is_refused_with_those_it_has(
    said: dict[str, str], message: str
) -> None:
    with pytest.raises(AddressError, match=message) as caught:
        chosen(**said)

    assert "eth0 10.0.0.7" in str(caught.value)


def test_the_interface_of_an_address_is_found_and_of_others_none() -> None:
    assert interface_of("fd00::7", INTERFACES) == "ib0"
    assert interface_of("10.9.9.9", INTERFACES) is None


def test_case_107_workers_get_the_variables_that_are_named_and_no_others() -> None:
    environ = {"HF_TOKEN": "t", "HF_HOME": "/h", "NCCL_DEBUG": "INFO", "PATH": "/bin", "HFX": "x"}

    assert environment_for_workers(["HF_*", "NCCL_DEBUG"], environ) == {
        "HF_TOKEN": "t",
        "HF_HOME": "/h",
        "NCCL_DEBUG": "INFO",
    }
    assert environment_for_workers([], environ) == {}


def test_case_107_what_a_node_says_of_itself_is_not_overwritten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    monkeypatch.delenv("NCCL_DEBUG", raising=False)

    add_environment({"NCCL_SOCKET_IFNAME": "eth0", "NCCL_DEBUG": "INFO"})

    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0"
    assert os.environ["NCCL_DEBUG"] == "INFO"
    monkeypatch.delenv("NCCL_DEBUG")
