"""Checks of what Ray says: whether it lets us in, which nodes it has, whether the ranks fit."""

from collections.abc import Iterator

from cluster.doctor.scene import Check, Problem, Room, Scene


def _ray(scene: Scene) -> Iterator[Problem]:
    if scene.ray_problem:
        seen, _, fix = scene.ray_problem.partition(" | ")
        yield Problem(
            "Ray",
            seen.rstrip("."),
            fix or "start one with `ray start --head`, or correct --address",
        )


def _nodes(scene: Scene) -> Iterator[Problem]:
    for room in scene.rooms:
        if not room.is_alive:
            yield Problem(
                f"node {room.node}",
                "Ray counts it as dead",
                "look at its raylet's log, and start Ray there again",
            )
    for node, asked in scene.silent.items():
        yield Problem(
            f"node {node}",
            f"did not answer in time ({asked})",
            "look whether its Ray processes are stopped or its link is cut; start Ray there again",
        )


def _nodes_well(scene: Scene) -> str:
    return f"all answer: {', '.join(host.node for host in scene.hosts)}"


def _placement(scene: Scene) -> Iterator[Problem]:
    asked = scene.asked
    ranks = asked.num_groups * asked.num_ranks
    kind = "GPUs" if asked.device == "cuda" else "CPUs"
    alive = [room for room in scene.rooms if room.is_alive]
    free = sum(int(_free(room, asked.device)) for room in alive)
    if free < ranks:
        total = sum(int(_total(room, asked.device)) for room in alive)
        yield Problem(
            "placement",
            f"asked for {ranks} {kind} ({asked.num_groups} groups of {asked.num_ranks} ranks), "
            f"{free} of {total} are free: {_by_node(scene)}",
            "lower tensor_parallel_size, pipeline_parallel_size or num_groups, add nodes, or end "
            "what holds them",
        )


def _free(room: Room, device: str) -> float:
    return room.free_gpus if device == "cuda" else room.free_cpus


def _total(room: Room, device: str) -> float:
    return room.gpus if device == "cuda" else room.cpus


def _by_node(scene: Scene) -> str:
    device = scene.asked.device
    return ", ".join(
        f"{room.node} {_free(room, device):g} of {_total(room, device):g}"
        for room in scene.rooms
        if room.is_alive
    )


def _placement_well(scene: Scene) -> str:
    ranks = scene.asked.num_groups * scene.asked.num_ranks
    return f"asked for {ranks}, free by node: {_by_node(scene)}"


CHECKS = (
    Check(
        name="ray",
        looks_at="the Ray cluster is there and takes our token",
        remedy="start Ray; give this host the token of the head (RAY_AUTH_TOKEN_PATH)",
        needs=lambda scene: scene.asked.uses_ray,
        run=_ray,
        well=lambda scene: f"nodes known: {len(scene.rooms)}",
    ),
    Check(
        name="nodes",
        looks_at="every node of Ray is alive and answers",
        remedy="start Ray there again; look whether its processes are stopped or its link is cut",
        needs=lambda scene: bool(scene.rooms),
        run=_nodes,
        well=_nodes_well,
    ),
    Check(
        name="placement",
        looks_at="CPUs or GPUs asked, free, and free on each node",
        remedy="smaller parallelism, fewer groups, or more nodes",
        needs=lambda scene: any(room.is_alive for room in scene.rooms),
        run=_placement,
        well=_placement_well,
    ),
)
