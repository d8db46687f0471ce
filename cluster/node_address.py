"""Under which address other nodes reach this one.

Never asked of its host name, which often resolves to a loopback address.
"""

import socket
from collections.abc import Mapping, Sequence

import psutil

from cluster.errors import AddressError


def own_addresses() -> dict[str, tuple[str, ...]]:
    """The IP addresses of each network interface of this host."""
    return {
        name: tuple(
            address.address.partition("%")[0]
            for address in addresses
            if address.family in (socket.AF_INET, socket.AF_INET6)
        )
        for name, addresses in psutil.net_if_addrs().items()
    }


def choose_address(
    known: str,
    *,
    address: str,
    interface: str,
    addresses_by_interface: Mapping[str, Sequence[str]],
) -> str:
    """The `address` that a user gave this node, or that of the `interface`; else what is `known`.

    Raises:
        AddressError: the node has no such address or interface; the message lists those it has.
    """
    there = ", ".join(
        f"{name} {one}" for name, held in addresses_by_interface.items() for one in held
    )
    if address:
        if not any(address in held for held in addresses_by_interface.values()):
            raise AddressError(
                f"STOKER_NODE_ADDRESS={address} is no address of this host, which has {there}"
            )
        return address
    if not interface:
        return known
    names = interface.split(",")
    held = [one for name in names for one in addresses_by_interface.get(name, ())]
    if not held:
        hint = " (a name, not one of NCCL's patterns)" if interface[0] in "^=" else ""
        raise AddressError(
            f"GLOO_SOCKET_IFNAME={interface} names no interface of this host{hint}, which has "
            f"{there}"
        )
    return known if known in held else held[0]


def names_of(node: str) -> tuple[str, ...]:
    """All names of a node that says what it is by address and host name, like `10.0.0.2 (gpu-7)`;
    or by one of them."""
    return tuple(word.strip("()") for word in node.split())


def interface_of(address: str, addresses_by_interface: Mapping[str, Sequence[str]]) -> str | None:
    """The interface that has the address, if one has."""
    return next((name for name, held in addresses_by_interface.items() if address in held), None)
