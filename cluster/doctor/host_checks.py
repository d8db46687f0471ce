"""Checks of what each host says of itself, beside its network."""

from collections.abc import Callable, Iterator

from cluster.doctor.scene import Asked, Check, Host, Problem, Scene

MIB = 1 << 20
GIB = 1 << 30

LEAST_OPEN_FILES = 4096
"""A thousand clients, with their sockets, and Ray's own hundreds."""
LEAST_PROCESSES = 2048
"""Ray alone has some hundred threads on a host, and each counts."""
NCCL_SHM_BYTES = 32 * MIB
"""Of each rank on a GPU of one host: some channels of 10 MB, which NCCL puts into /dev/shm."""
AMPLE_NCCL_SHM_BYTES = 512 * MIB
LEAST_RAY_SHM_BYTES = 128 * MIB
"""Ray's object store; with less it takes a file on disk."""
LEAST_DISK_BYTES = GIB
"""For Ray's session, logs and sockets."""
RANK_BYTES = 300 * MIB
"""A rank's own memory beside weights and K/V: the libraries, and the largest step."""


def _one(scene: Scene) -> str:
    return "1 host" if len(scene.hosts) == 1 else f"{len(scene.hosts)} hosts"


def _node(host: Host) -> str:
    return f"node {host.node}"


# --- versions and the model ------------------------------------------------------------------


def _python_minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _public(version: str) -> str:
    """Less what says how it was built: 2.13.0+cpu and 2.13.0+cu130 understand each other."""
    return version.partition("+")[0]


def _same(version: str) -> str:
    return version


_VERSIONS: tuple[tuple[str, Callable[[Host], str], Callable[[str], str]], ...] = (
    ("Python", lambda host: host.python, _python_minor),
    ("Ray", lambda host: host.ray, _same),
    ("torch", lambda host: host.torch, _public),
    ("Stoker", lambda host: host.stoker, _same),
)


def differing_versions(host: Host, leader: Host) -> Iterator[Problem]:
    """What of the software differs between a host and the leader."""
    for name, of, what_counts in _VERSIONS:
        theirs, ours = of(host), of(leader)
        if what_counts(theirs) != what_counts(ours):
            yield Problem(
                _node(host),
                f"has {name} {theirs or '(none)'}, but {leader.node} has {ours or '(none)'}",
                f"install {name} {ours} on {host.node}, or the same environment on every node",
            )


def _versions(scene: Scene) -> Iterator[Problem]:
    for host in scene.hosts:
        yield from differing_versions(host, scene.here)
    if not scene.here.torch:
        yield Problem(
            _node(scene.here),
            "torch is not installed where Stoker runs",
            "use the environment that has both, or pip install torch into this one",
        )
    for host in scene.hosts:
        if host.missing_libraries:
            yield Problem(
                _node(host),
                f"native libraries were not built: {', '.join(host.missing_libraries)}",
                "run `make setup` or `pip install -e .` there (a C++ compiler is needed)",
            )


def _versions_well(scene: Scene) -> str:
    leader = scene.here
    return (
        f"Python {leader.python}, Ray {leader.ray or '(none)'}, torch {leader.torch}, "
        f"Stoker {leader.stoker} on {_one(scene)}"
    )


def differing_model(host: Host, leader: Host) -> Iterator[Problem]:
    """What is wrong with a host's checkpoint, by itself or beside the leader's."""
    if host.model is None:
        return
    if host.model.problem:
        yield Problem(
            _node(host), host.model.problem, "put the whole checkpoint there, in the same folder"
        )
    elif leader.model is not None and leader.model.digest not in ("", host.model.digest):
        yield Problem(
            _node(host),
            f"holds another model: digest {host.model.digest}, but {leader.node} has "
            f"{leader.model.digest}",
            "copy the checkpoint anew, so that each node has the same files",
        )


def _model(scene: Scene) -> Iterator[Problem]:
    for host in scene.hosts:
        yield from differing_model(host, scene.here)


def _model_well(scene: Scene) -> str:
    model = scene.here.model
    assert model is not None
    return f"digest {model.digest}, {_gib(model.weight_bytes)} of weights on {_one(scene)}"


# --- memory, disk, limits --------------------------------------------------------------------


def _gib(num_bytes: float) -> str:
    if num_bytes < GIB:
        return f"{num_bytes / MIB:.0f} MiB"
    return f"{num_bytes / GIB:.1f} GiB"


def ranks_on(host: Host, scene: Scene) -> int:
    """How many ranks a host bears, if they are spread evenly."""
    asked = scene.asked
    num_hosts = max(1, len(scene.hosts))
    ranks = asked.num_groups * asked.num_ranks
    place = [other.node for other in scene.hosts].index(host.node)
    return ranks // num_hosts + (place < ranks % num_hosts)


def held_bytes(host: Host, asked: Asked) -> int:
    """Of the weights of one group, as its ranks hold them together; at least."""
    model = host.model
    if model is None:
        return 0
    if asked.bytes_per_weight is None or not model.bytes_per_weight:
        return model.weight_bytes
    return int(model.weight_bytes / model.bytes_per_weight * asked.bytes_per_weight)


def _memory(scene: Scene) -> Iterator[Problem]:
    for host in scene.hosts:
        ranks = ranks_on(host, scene)
        weights = 0 if scene.asked.device == "cuda" else held_bytes(host, scene.asked)
        holders = min(ranks, scene.asked.num_ranks) if scene.asked.shares_weights else ranks
        wanted = ranks * RANK_BYTES + holders * (weights // scene.asked.num_ranks)
        if wanted > host.memory_free_bytes:
            yield Problem(
                _node(host),
                f"{ranks} ranks need {_gib(wanted)} before any K/V, and "
                f"{_gib(host.memory_free_bytes)} are free of {_gib(host.memory_bytes)}",
                "free memory, add nodes, or lower num_groups",
            )


def _memory_well(scene: Scene) -> str:
    least = min(scene.hosts, key=lambda host: host.memory_free_bytes)
    return f"{_gib(least.memory_free_bytes)} free on {least.node}, the least of {_one(scene)}"


def _shm(scene: Scene) -> Iterator[Problem]:
    for host in scene.hosts:
        many = scene.asked.device == "cuda" and scene.asked.num_ranks > 1
        least = NCCL_SHM_BYTES * ranks_on(host, scene)
        if many and host.shm_free_bytes < max(least, AMPLE_NCCL_SHM_BYTES):
            yield Problem(
                _node(host),
                f"/dev/shm has {_gib(host.shm_free_bytes)} free of {_gib(host.shm_bytes)}; NCCL "
                f"needs {_gib(least)} for ranks that share a host, and more may make it faster",
                "start the container with --shm-size=1g (Kubernetes: an emptyDir of medium "
                "Memory at /dev/shm), or set NCCL_SHM_DISABLE=1",
                level="fail" if host.shm_free_bytes < least else "warn",
            )
        elif scene.asked.uses_ray and host.shm_free_bytes < LEAST_RAY_SHM_BYTES:
            yield Problem(
                _node(host),
                f"/dev/shm has {_gib(host.shm_free_bytes)} free of {_gib(host.shm_bytes)}: Ray "
                "puts its object store on disk instead; ranks of Stoker need nothing of it",
                "start the container with --shm-size=1g",
                level="warn",
            )


def _shm_well(scene: Scene) -> str:
    least = min(scene.hosts, key=lambda host: host.shm_free_bytes)
    return f"{_gib(least.shm_free_bytes)} of /dev/shm free on {least.node}"


def _limits(scene: Scene) -> Iterator[Problem]:
    for host in scene.hosts:
        if host.open_files is not None and host.open_files < LEAST_OPEN_FILES:
            yield Problem(
                _node(host),
                f"may open {host.open_files} files (ulimit -n), wanted {LEAST_OPEN_FILES}",
                f"ulimit -n {LEAST_OPEN_FILES * 4}, or LimitNOFILE= of the service",
                level="fail" if host.open_files < LEAST_OPEN_FILES // 8 else "warn",
            )
        if host.processes is not None and host.processes < LEAST_PROCESSES:
            yield Problem(
                _node(host),
                f"may have {host.processes} processes and threads (ulimit -u), wanted "
                f"{LEAST_PROCESSES}",
                f"ulimit -u {LEAST_PROCESSES * 4}, or TasksMax= of the service",
                level="fail" if host.processes < LEAST_PROCESSES // 8 else "warn",
            )


def _limits_well(scene: Scene) -> str:
    files = [host.open_files for host in scene.hosts if host.open_files is not None]
    return f"{min(files) if files else 'any number of'} open files, enough processes"


def _disk(scene: Scene) -> Iterator[Problem]:
    for host in scene.hosts:
        for path, free in host.disk_free_by_path.items():
            if free < LEAST_DISK_BYTES:
                yield Problem(
                    _node(host),
                    f"{path} has {_gib(free)} free, wanted {_gib(LEAST_DISK_BYTES)}",
                    "free space there; old sessions of Ray lie in /tmp/ray",
                    level="fail" if free < LEAST_DISK_BYTES // 10 else "warn",
                )


def _disk_well(scene: Scene) -> str:
    free = [free for host in scene.hosts for free in host.disk_free_by_path.values()]
    return f"{_gib(min(free))} free at least" if free else "not asked"


# --- devices, clocks, leftovers --------------------------------------------------------------


def _devices(scene: Scene) -> Iterator[Problem]:
    drivers = {host.driver for host in scene.hosts if host.num_gpus}
    for host in scene.hosts:
        if scene.asked.device == "cuda" and not host.num_gpus:
            yield Problem(
                _node(host),
                "has no GPU that NVIDIA's driver knows",
                "load the driver, give the container its GPUs (--gpus all), or use device=cpu",
            )
        elif len(drivers) > 1 and host.num_gpus and host.driver != scene.leader.driver:
            yield Problem(
                _node(host),
                f"has NVIDIA driver {host.driver}, but {scene.leader.node} has "
                f"{scene.leader.driver or 'none'}",
                "install the same driver on every node",
                level="warn",
            )


def _devices_well(scene: Scene) -> str:
    cores = sum(host.num_cores for host in scene.hosts)
    gpus = sum(host.num_gpus for host in scene.hosts)
    return f"{cores} cores, {gpus} GPUs on {_one(scene)}"


MOST_SKEW_S = 1.0
"""Logs of nodes can still be read side by side. Stoker itself compares no clocks of two hosts,
but certificates and tokens do."""


def _clock(scene: Scene) -> Iterator[Problem]:
    for host in scene.hosts[1:]:
        ahead = host.clock_ahead_s
        if ahead is not None and abs(ahead) - host.clock_error_s > MOST_SKEW_S:
            word = "ahead of" if ahead > 0 else "behind"
            yield Problem(
                _node(host),
                f"its clock is {abs(ahead):.1f} s {word} that of {scene.leader.node}",
                "keep time with chrony or systemd-timesyncd on every node",
                level="warn",
            )


def _clock_well(scene: Scene) -> str:
    known = [abs(h.clock_ahead_s) for h in scene.hosts if h.clock_ahead_s is not None]
    return f"within {max(known, default=0.0):.3f} s of {scene.leader.node}"


def _stale(scene: Scene) -> Iterator[Problem]:
    if scene.here.stale_ray:
        yield Problem(
            _node(scene.here),
            f"holds what is left of a Ray that is gone: {', '.join(scene.here.stale_ray)}",
            "end it with `ray stop --force`, unless another Ray runs there too",
            level="warn",
        )


CHECKS = (
    Check(
        name="versions",
        looks_at="Python, Ray, torch and Stoker are the leader's; the native libraries are built",
        remedy="the same environment on every node; `make setup` where libraries are missing",
        run=_versions,
        well=_versions_well,
    ),
    Check(
        name="model",
        looks_at="the checkpoint is whole on each node, and the same",
        remedy="copy the whole checkpoint to the same folder on each node",
        needs=lambda scene: any(host.model is not None for host in scene.hosts),
        run=_model,
        well=_model_well,
    ),
    Check(
        name="memory",
        looks_at="free memory bears the weights and the libraries of the ranks",
        remedy="free memory, more nodes, fewer groups, or narrower weights",
        run=_memory,
        well=_memory_well,
    ),
    Check(
        name="shared memory",
        looks_at="/dev/shm is large enough for NCCL and Ray",
        remedy="start the container with --shm-size=1g",
        run=_shm,
        well=_shm_well,
    ),
    Check(
        name="limits",
        looks_at="open files and processes that the user may have",
        remedy="ulimit -n and -u, or LimitNOFILE= and TasksMax= of the service",
        run=_limits,
        well=_limits_well,
    ),
    Check(
        name="disk",
        looks_at="free space for temporary files and models",
        remedy="free space; old sessions of Ray lie in /tmp/ray",
        needs=lambda scene: any(host.disk_free_by_path for host in scene.hosts),
        run=_disk,
        well=_disk_well,
    ),
    Check(
        name="devices",
        looks_at="GPUs where they are asked for, and their driver",
        remedy="NVIDIA's driver, the same on each node; containers with their GPUs (--gpus all)",
        run=_devices,
        well=_devices_well,
    ),
    Check(
        name="clock",
        looks_at="each node's clock beside the leader's, by round trips",
        remedy="chrony or systemd-timesyncd on every node",
        needs=lambda scene: any(host.clock_ahead_s is not None for host in scene.hosts[1:]),
        run=_clock,
        well=_clock_well,
    ),
    Check(
        name="stale Ray",
        looks_at="Ray processes whose head is gone, and the file that names such a head",
        remedy="`ray stop --force`",
        run=_stale,
        well=lambda scene: "no leftovers",
    ),
)
