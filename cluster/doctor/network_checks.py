"""Checks of addresses, of the ways between nodes, and of what they carry."""

import ipaddress
import statistics
from collections.abc import Iterator

from cluster.doctor.scene import Check, Host, Pair, Problem, Scene

SLOW_BYTES_PER_S = 20e6
"""Below this a sum of hidden states takes longer than computing them, on any machine."""
SLOW_LATENCY_S = 0.05
SLOW_SHARE = 0.25
"""Of the median of the other links, where there are at least two."""


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def interface_of(host: Host, address: str) -> str:
    """The name of the interface that has this address; empty if none has."""
    for interface in host.interfaces:
        if address in interface.addresses:
            return interface.name
    return ""


def _is_name(address: str) -> bool:
    """Whether it is none of numbers, so that only the resolver knows whose it is."""
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return True
    return False


# --- addresses -------------------------------------------------------------------------------


def _addresses(scene: Scene) -> Iterator[Problem]:
    for host in scene.hosts:
        if not host.address:
            continue
        name = interface_of(host, host.address)
        if is_loopback(host.address) and not scene.is_one_host:
            yield Problem(
                f"node {host.node}, interface lo",
                f"is known as {host.address}, where no other node reaches it",
                "start its Ray with --node-ip-address set to an address that the others reach",
            )
        elif not name and not _is_name(host.address):
            had = ", ".join(a for i in host.interfaces for a in i.addresses if not is_loopback(a))
            yield Problem(
                f"node {host.node}",
                f"is known as {host.address}, which none of its interfaces has; it has {had}",
                "start its Ray with --node-ip-address set to one of them",
            )
        elif not next((i.is_up for i in host.interfaces if i.name == name), True):
            yield Problem(
                f"node {host.node}, interface {name}",
                f"is down, and {host.address} with it",
                f"ip link set {name} up, or use another interface",
            )


def _addresses_well(scene: Scene) -> str:
    return ", ".join(
        f"{host.address} ({interface_of(host, host.address) or 'by name'})"
        for host in scene.hosts
        if host.address
    )


def _routes(scene: Scene) -> Iterator[Problem]:
    for number, host in enumerate(scene.hosts):
        towards = host.address_outward
        other = scene.hosts[1 if number == 0 else 0]
        if not towards:
            yield Problem(
                f"node {host.node}",
                f"has no route to {other.address}",
                "connect the nodes' networks, or start Ray on addresses of one network",
            )
        elif towards != host.address and not is_loopback(towards):
            name = interface_of(host, towards)
            yield Problem(
                f"node {host.node}, interface {name}",
                f"reaches {other.node} through {name} ({towards}), but is known to the others as "
                f"{host.address} ({interface_of(host, host.address) or 'no interface'})",
                f"start its Ray with --node-ip-address {towards}, set STOKER_NODE_ADDRESS there, "
                "or correct its routes",
            )


def _names(scene: Scene) -> Iterator[Problem]:
    if scene.is_one_host:
        return
    for host in scene.hosts:
        found = host.name_resolves_to
        if found and all(is_loopback(address) for address in found):
            yield Problem(
                f"node {host.node}, interface lo",
                f"its own name {host.name} resolves to {', '.join(found)}; libraries that ask for "
                "it would listen where no other node reaches them",
                f"in its /etc/hosts, give {host.name} the address {host.address}",
                level="warn",
            )


def _names_well(scene: Scene) -> str:
    return ", ".join(
        f"{host.name} is {host.name_resolves_to[0] if host.name_resolves_to else 'not known'}"
        for host in scene.hosts[:4]
    )


def _variables(scene: Scene) -> Iterator[Problem]:
    for host in scene.hosts:
        names = {interface.name for interface in host.interfaces}
        for variable, value in host.variables.items():
            wrong = wrong_interface(variable, value, names)
            if wrong:
                yield Problem(
                    f"node {host.node}, variable {variable}",
                    wrong,
                    f"unset {variable}, or name an interface of that node",
                )


def wrong_interface(variable: str, value: str, names: set[str]) -> str:
    """What is wrong with the value of GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME; empty: nothing."""
    is_nccl = variable.startswith("NCCL")
    if value.startswith(("^", "=")) and not is_nccl:
        return f"is {value!r}, but gloo takes names of interfaces alone, and NCCL's ^ and = not"
    excludes, exact = value.startswith("^"), not is_nccl or value.startswith("=")
    wanted = [name.partition(":")[0] for name in value.lstrip("^=").split(",") if name]
    if excludes:
        return ""
    unknown = [
        w for w in wanted if not any(n == w or (not exact and n.startswith(w)) for n in names)
    ]
    if unknown and len(unknown) == len(wanted):
        return f"names {', '.join(unknown)}, but the interfaces are {', '.join(sorted(names))}"
    return ""


def _variables_well(scene: Scene) -> str:
    return "every interface that is named exists"


def _sockets(scene: Scene) -> Iterator[Problem]:
    for taken in scene.here.taken_addresses:
        yield Problem(
            f"node {scene.here.node}",
            f"cannot listen at {taken}",
            "give front_address and back_address an address of this host and a free port",
        )


# --- ways between nodes ----------------------------------------------------------------------


def _ports(scene: Scene) -> Iterator[Problem]:
    for path in scene.paths:
        if path.problem:
            yield Problem(
                f"node {path.target}",
                f"{path.source} cannot connect to {path.address} on it: {path.problem}",
                f"let {path.source} through the firewall of {path.target}: all ports between "
                "nodes, since ranks take any free one",
            )


def _ports_well(scene: Scene) -> str:
    slowest = max(path.rtt_s for path in scene.paths)
    return f"{len(scene.paths)} ways between nodes, round trips up to {slowest * 1e3:.1f} ms"


def _collectives(scene: Scene) -> Iterator[Problem]:
    for pair in scene.pairs:
        if pair.problem:
            yield Problem(
                f"nodes {pair.nodes[0]} and {pair.nodes[1]}",
                f"ranks on them do not meet by {pair.how}: {pair.problem}",
                "look for a firewall between them, and at the findings about addresses",
            )


def _collectives_well(scene: Scene) -> str:
    return f"{len(scene.pairs)} pairs of nodes met by {scene.pairs[0].how}"


def _speed(scene: Scene) -> Iterator[Problem]:
    good = [pair for pair in scene.pairs if not pair.problem]
    for pair in good:
        others = [other.bytes_per_s for other in good if other is not pair]
        usual = statistics.median(others) if len(others) >= 2 else 0.0
        too_slow = pair.bytes_per_s < max(SLOW_BYTES_PER_S, SLOW_SHARE * usual)
        if too_slow or pair.latency_s > SLOW_LATENCY_S:
            yield Problem(
                f"nodes {pair.nodes[0]} and {pair.nodes[1]}",
                f"sums between them run at {_rate(pair)}, {pair.latency_s * 1e3:.1f} ms for a "
                f"small one; {_usual(usual)}",
                "look at the link's speed (ethtool), its errors (ip -s link) and who else uses it; "
                "keep tensor-parallel ranks within a node",
                level="warn",
            )


def _usual(usual: float) -> str:
    if usual:
        return f"the other pairs' median is {usual / 1e6:.0f} MB/s"
    return f"wanted {SLOW_BYTES_PER_S / 1e6:.0f} MB/s and {SLOW_LATENCY_S * 1e3:.0f} ms"


def _rate(pair: Pair) -> str:
    return f"{pair.bytes_per_s / 1e6:.1f} MB/s"


def _speed_well(scene: Scene) -> str:
    good = [pair for pair in scene.pairs if not pair.problem]
    slowest = min(good, key=lambda pair: pair.bytes_per_s)
    latency = max(pair.latency_s for pair in good)
    return f"{_rate(slowest)} at least, small sums within {latency * 1e3:.1f} ms"


CHECKS = (
    Check(
        name="addresses",
        looks_at="the address by which others know a node is one of its own, up, and no loopback",
        remedy="start Ray with --node-ip-address",
        needs=lambda scene: any(host.address for host in scene.hosts),
        run=_addresses,
        well=_addresses_well,
    ),
    Check(
        name="routes",
        looks_at="the interface that routes to the others has the address that they know",
        remedy="start Ray with --node-ip-address, or correct the routes",
        needs=lambda scene: len(scene.hosts) > 1,
        run=_routes,
        well=lambda scene: (
            f"every node routes to {scene.leader.node} by the address it is known by"
        ),
    ),
    Check(
        name="host names",
        looks_at="a host's own name resolves, and not to loopback where there are several hosts",
        remedy="in /etc/hosts, give the host's name its real address",
        run=_names,
        well=_names_well,
    ),
    Check(
        name="variables",
        looks_at="GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name interfaces, each in its syntax",
        remedy="unset them: Stoker takes the interface that routes to the others",
        run=_variables,
        well=_variables_well,
    ),
    Check(
        name="sockets",
        looks_at="front_address and back_address can be bound on the leader",
        remedy="an address of this host, and a free port",
        run=_sockets,
        well=lambda scene: "the addresses asked for are free",
    ),
    Check(
        name="ports",
        looks_at="any port of each node can be reached from each other node",
        remedy="let the nodes through each other's firewalls, on all ports",
        needs=lambda scene: bool(scene.paths),
        run=_ports,
        well=_ports_well,
    ),
    Check(
        name="collectives",
        looks_at="two ranks, one on each of two nodes, meet and sum",
        remedy="as for ports and addresses",
        needs=lambda scene: bool(scene.pairs),
        run=_collectives,
        well=_collectives_well,
    ),
    Check(
        name="speed",
        looks_at="bandwidth and latency of sums between nodes, beside the other pairs",
        remedy="look at the link; keep tensor-parallel ranks within a node",
        needs=lambda scene: any(not pair.problem for pair in scene.pairs),
        run=_speed,
        well=_speed_well,
    ),
)
