"""What a check looks at, and what it finds: facts as data, whoever collected them.

Facts cross processes, so they are structs; nothing here looks at the machine.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from msgspec import Struct

Level: TypeAlias = Literal["ok", "warn", "fail"]


class Interface(Struct, frozen=True, kw_only=True):
    """One network interface of a host."""

    name: str
    addresses: tuple[str, ...]
    is_up: bool = True


class ModelFacts(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A checkpoint as it lies on one host."""

    digest: str = ""
    """Of its settings, tokenizer, and samples of its weights; empty if something is wrong."""
    problem: str = ""
    """What is missing or not whole."""
    weight_bytes: int = 0
    bytes_per_weight: int = 0
    """As the files hold them; 0: not known."""


class Host(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one machine says of itself. Empty texts: not there; None: not limited or unknown."""

    node: str
    """Its name in findings: the address that Ray knows, or the host's name."""
    name: str = ""
    address: str = ""
    """At which other nodes are to reach it."""
    python: str = ""
    ray: str = ""
    torch: str = ""
    stoker: str = ""
    missing_libraries: tuple[str, ...] = ()
    """Native parts of Stoker that were not built."""
    model: ModelFacts | None = None
    interfaces: tuple[Interface, ...] = ()
    name_resolves_to: tuple[str, ...] = ()
    address_outward: str = ""
    """Of the interface by which this host reaches the leader (the leader: another node); empty:
    no route."""
    variables: dict[str, str] = {}
    """Those that choose an interface for gloo or NCCL."""
    shm_bytes: int = 0
    shm_free_bytes: int = 0
    open_files: int | None = None
    processes: int | None = None
    locked_memory_bytes: int | None = None
    memory_bytes: int = 0
    memory_free_bytes: int = 0
    disk_free_by_path: dict[str, int] = {}
    num_cores: int = 0
    num_gpus: int = 0
    driver: str = ""
    stale_ray: tuple[str, ...] = ()
    """What is left of Ray clusters that are gone."""
    taken_addresses: tuple[str, ...] = ()
    """Of our own sockets, those that cannot be bound here, each with the reason."""
    clock_ahead_s: float | None = None
    """Of the leader's clock; None: not measured."""
    clock_error_s: float = 0.0
    """By how much that may be wrong."""


class Room(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What Ray says of one node."""

    node: str
    address: str = ""
    is_alive: bool = True
    cpus: float = 0.0
    free_cpus: float = 0.0
    gpus: float = 0.0
    free_gpus: float = 0.0


class Path(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One direction between two nodes: can `source` open a connection to `target`?"""

    source: str
    target: str
    address: str
    problem: str = ""
    rtt_s: float = 0.0


class Pair(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What collectives between two nodes cost."""

    nodes: tuple[str, str]
    how: str = "gloo"
    problem: str = ""
    latency_s: float = 0.0
    """Of the sum of a few kilobytes."""
    bytes_per_s: float = 0.0
    """Of the sum of some megabytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a cluster is to be, as far as hosts must bear it."""

    num_groups: int = 1
    num_ranks: int = 1
    """Of one group."""
    device: str = "cpu"
    uses_ray: bool = False
    """Of somebody else, with nodes of its own."""
    bytes_per_weight: float | None = None
    """As ranks are to hold them; None: as the files do."""
    shares_weights: bool = False
    """Groups of one host hold them once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Everything that is known when the checks run."""

    asked: Asked
    here: Host
    """Where the engine is to run, as this process sees it: its versions are to be everybody's."""
    hosts: tuple[Host, ...]
    """That are to bear ranks; the leader, where the engine runs, first."""
    rooms: tuple[Room, ...] = ()
    paths: tuple[Path, ...] = ()
    pairs: tuple[Pair, ...] = ()
    ray_problem: str = ""
    """Why Ray does not let us in."""
    silent: dict[str, str] = field(default_factory=dict)
    """Nodes that did not tell their facts in time, and what they were asked last."""

    @property
    def leader(self) -> Host:
        return self.hosts[0]

    @property
    def is_one_host(self) -> bool:
        return len(self.hosts) + len(self.silent) == 1


class Finding(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one check says of one culprit, or that all is well."""

    check: str
    level: Level
    subject: str = ""
    """Who is to blame: a node, a node's interface, two nodes, a rank."""
    seen: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Problem:
    """A check's complaint about one culprit."""

    subject: str
    seen: str
    fix: str
    level: Level = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One question about a scene."""

    name: str
    looks_at: str
    remedy: str
    """For the table in the documents; a finding says what to do about itself."""
    needs: Callable[[Scene], bool] = lambda scene: bool(scene.hosts)
    """Whether the scene says enough to ask it."""
    run: Callable[[Scene], Iterable[Problem]]
    well: Callable[[Scene], str]
    """What to say if there is no problem."""

    def findings(self, scene: Scene) -> list[Finding]:
        """One finding for each culprit; one alone if all is well; none if it cannot be asked."""
        if not self.needs(scene):
            return []
        problems = [
            Finding(check=self.name, level=p.level, subject=p.subject, seen=p.seen, fix=p.fix)
            for p in self.run(scene)
        ]
        return problems or [Finding(check=self.name, level="ok", seen=self.well(scene))]
