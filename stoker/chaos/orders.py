"""Which faults there are to order, one by one or by chance."""

import random
from collections.abc import Collection
from dataclasses import dataclass

from cluster.messages.faults import Fault, FaultKind, InjectFault

HANG_S = 3600.0
"""Of a fault that lasts until somebody ends the process."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One kind of thing that goes wrong, and how often it is drawn."""

    name: str
    weight: int
    target: str
    """rank, group, node or engine"""
    kind: FaultKind
    is_hang: bool = False
    """Whether only time tells that it has happened"""
    seconds: tuple[float, float] = (0.0, 0.0)
    """From which its duration is drawn"""
    count: int = 1


RECIPES = (
    Recipe("kill a rank", 24, "rank", "kill"),
    Recipe("kill a group", 6, "group", "kill"),
    Recipe("kill a node's ranks", 3, "node", "kill"),
    Recipe("raise in a step", 12, "rank", "raise"),
    Recipe("cut a rank's link", 12, "rank", "cut"),
    Recipe("lose a plan", 8, "rank", "miss", is_hang=True),
    Recipe("lose an answer", 8, "rank", "drop", is_hang=True),
    Recipe("hang in a step", 5, "rank", "slow", is_hang=True, seconds=(HANG_S, HANG_S)),
    Recipe("stop a rank", 4, "rank", "stop", is_hang=True, seconds=(30.0, 30.0)),
    Recipe("stop a rank shortly", 4, "rank", "stop", seconds=(0.05, 1.0)),
    Recipe("slow a rank down", 4, "rank", "slow", seconds=(0.01, 0.1), count=20),
    Recipe("hold answers up", 4, "rank", "delay", seconds=(0.01, 0.2), count=10),
    Recipe("fill the pool", 6, "group", "full", seconds=(0.1, 2.0)),
    Recipe("kill the engine", 6, "engine", "kill"),
    Recipe("stop the engine shortly", 2, "engine", "stop", seconds=(0.05, 1.0)),
)


@dataclass(frozen=True, slots=True)
class Order:
    """A fault, and what it is called."""

    name: str
    asked: InjectFault
    is_hang: bool = False

    @property
    def hits_engine(self) -> bool:
        return self.asked.group < 0 and not self.asked.node


@dataclass(frozen=True, slots=True)
class Shape:
    """What there is to be hit."""

    groups: tuple[int, ...]
    num_ranks: int
    """Of each group"""
    nodes: tuple[str, ...]


class Drawer:
    """Draws orders by chance: the same ones from the same seed and shapes."""

    def __init__(
        self, chance: random.Random, *, kinds: Collection[str] = (), with_engine: bool = True
    ) -> None:
        """
        Args:
            kinds: of `FaultKind`, to draw from; empty: all.
            with_engine: whether the engine may be hit, too.
        """
        self._chance = chance
        self._recipes = [
            recipe
            for recipe in RECIPES
            if (with_engine or recipe.target != "engine") and (not kinds or recipe.kind in kinds)
        ]

    def draw(self, shape: Shape) -> Order:
        """The next one."""
        chance = self._chance
        recipe = chance.choices(self._recipes, [each.weight for each in self._recipes])[0]
        group, rank = chance.choice(shape.groups), chance.randrange(shape.num_ranks)
        fault = Fault(
            kind=recipe.kind,
            after_s=chance.uniform(0.0, 0.1) if recipe.target == "engine" else 0.0,
            seconds=chance.uniform(*recipe.seconds),
            count=recipe.count,
        )
        match recipe.target:
            case "engine":
                asked = InjectFault(fault=fault)
            case "node":
                asked = InjectFault(fault=fault, node=chance.choice(shape.nodes))
            case "group":
                asked = InjectFault(fault=fault, group=group)
            case _:
                asked = InjectFault(fault=fault, group=group, rank=rank)
        return Order(recipe.name, asked, recipe.is_hang)
