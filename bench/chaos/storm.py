"""One storm: the load, undisturbed first; then faults under it; then the verdict and figures."""

import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from bench.chaos.calls import make_calls
from bench.chaos.cluster import Served
from bench.chaos.judge import Verdict, judge, percentile, stalls_at, token_rate
from bench.chaos.load import Load
from cluster.errors import ClusterLost
from stoker.chaos.link import ChaosLink
from stoker.chaos.orders import RECIPES, Drawer
from stoker.chaos.storm import FaultReport, Storm
from stoker.chaos.watch import ClusterWatch

MEND_S = 240.0
"""A cluster that is not whole again after so long stays broken."""

KILLS = ("kill a rank", "kill a group", "kill a node's ranks", "kill the engine")
"""Faults that happen when they are ordered; others wait until the rank listens, or for a step."""

TOLD = ("raise in a step", "cut a rank's link")
HANGS = tuple(recipe.name for recipe in RECIPES if recipe.is_hang)


@dataclass(frozen=True, slots=True, kw_only=True)
class StormConfig:
    """How hard it blows."""

    num_faults: int
    lasts_s: float = float("inf")
    """After so long no more faults come, however many there were."""
    seed: int = 0
    num_calls: int = 150
    """Different requests, which are asked again and again"""
    max_tokens: int = 160
    max_prompt: int = 400
    num_callers: int = 10
    num_http: int = 4
    think_s: float = 0.2
    pause_s: float = 1.5
    """Most seconds between two faults"""
    pair_share: float = 0.15
    """Of faults that come two at once"""
    haste_share: float = 0.3
    """Of faults that do not wait until the cluster is whole again, but only until it serves"""
    with_engine: bool = True
    kinds: frozenset[str] = frozenset()
    """Of `FaultKind`; empty: all"""
    step_timeout_s: float = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a storm has shown."""

    faults: list[FaultReport]
    verdict: Verdict
    stalls_s: list[float]
    """Of each stream that was alive at a fault that was noticed"""
    calm_rate: float
    """Output tokens per second without faults"""
    storm_rate: float
    """The same from the first fault to the last one's end"""
    whole_rate: float
    """The same of the times in the storm in which every group was ready"""
    seconds: float
    left_behind: list[str]
    held_blocks: int

    @property
    def num_noticed(self) -> int:
        return sum(fault.noticed_s is not None for fault in self.faults)

    def detections_s(self, names: Collection[str]) -> list[float]:
        """How long each of these faults was there before it was noticed."""
        return [
            fault.noticed_s
            for fault in self.faults
            if fault.noticed_s is not None and fault.what in names
        ]

    @property
    def is_clean(self) -> bool:
        return (
            self.verdict.is_clean
            and not self.left_behind
            and not self.held_blocks
            and not any(fault.is_broken for fault in self.faults)
        )


def run_storm(served: Served, config: StormConfig, tell: Callable[[str], None]) -> Result:
    """Blow, and end the cluster."""
    calls = make_calls(
        config.num_calls, seed=7, max_tokens=config.max_tokens, max_prompt=config.max_prompt
    )
    load = Load(
        served.address,
        served.http_address,
        calls,
        num_callers=config.num_callers,
        num_http=config.num_http,
        think_s=config.think_s,
    )
    began = time.monotonic()
    right = load.once(calls, config.num_callers + config.num_http)
    calm = (began, time.monotonic())
    broken = [f"{answer.call.kind}: {answer.error}" for answer in right if answer.error]
    if broken:
        raise RuntimeError(f"the undisturbed run went wrong: {broken[:3]}")
    tell(f"undisturbed: {len(right)} calls in {calm[1] - calm[0]:.0f} s")
    faults: list[FaultReport] = []

    def note(fault: FaultReport) -> None:
        faults.append(fault)
        tell(f"{len(faults):4d}/{config.num_faults} {fault.sentence()}")

    with ChaosLink(served.address) as link, ClusterWatch(served.address) as watch:
        load.start()
        time.sleep(1.0)
        stormy = time.monotonic()
        storm = Storm(link, watch, note, watch_s=config.step_timeout_s + 4.0, mend_s=MEND_S)
        try:
            _blow(storm, watch, config, served)
        except ClusterLost as error:
            tell(str(error))
        finally:
            answers = load.stop()
        ended = time.monotonic()
        whole = watch.whole_spans(stormy, ended)
        noticed = watch.losses(stormy, ended)
    held_blocks = served.held_blocks()
    expected = {answer.call.number: answer for answer in right}
    return Result(
        faults=faults,
        verdict=judge(answers, expected),
        stalls_s=stalls_at(answers, noticed),
        calm_rate=token_rate(right, [calm]),
        storm_rate=token_rate(answers, [(stormy, ended)]),
        whole_rate=token_rate(answers, whole),
        seconds=ended - stormy,
        left_behind=served.end(),
        held_blocks=held_blocks,
    )


def _blow(storm: Storm, watch: ClusterWatch, config: StormConfig, served: Served) -> None:
    chance = random.Random(config.seed)
    drawer = Drawer(chance, kinds=config.kinds, with_engine=config.with_engine)
    num_drawn, ends_at = 0, time.monotonic() + config.lasts_s
    while num_drawn < config.num_faults and time.monotonic() < ends_at:
        if chance.random() < config.haste_share:
            storm.wait_served()
        else:
            storm.wait_whole()
        storm.pause(chance.uniform(0.0, config.pause_s))
        served.remember_family()
        num_at_once = 2 if chance.random() < config.pair_share else 1
        for _ in range(min(num_at_once, config.num_faults - num_drawn)):
            groups = tuple(watch.now.ready) or watch.shape.groups
            order = drawer.draw(replace(watch.shape, groups=groups))
            num_drawn += storm.try_to_let_happen(order)
    storm.settle()
    storm.wait_whole()


def table(result: Result, config: StormConfig) -> list[Sequence[str]]:
    """Name and value, for people."""
    verdict = result.verdict
    wholes = [fault.whole_s for fault in result.faults if fault.whole_s is not None]
    broken = sum(fault.is_broken for fault in result.faults)

    def spread(values: Sequence[float]) -> str:
        if not values:
            return "none"
        p50, p99 = percentile(values, 50), percentile(values, 99)
        return f"p50 {p50:.3f} s, p99 {p99:.3f} s, of {len(values)}"

    return [
        ("faults", f"{len(result.faults)} in {result.seconds:.0f} s, seed {config.seed}"),
        ("noticed", f"{result.num_noticed} (the others cost nothing but time)"),
        ("not whole again", str(broken)),
        ("streams", f"{verdict.num_streams} with {verdict.num_tokens} tokens"),
        ("dropped streams", str(len(verdict.dropped))),
        ("outputs with lost tokens", str(len(verdict.short))),
        ("outputs with doubled tokens", str(len(verdict.doubled))),
        ("outputs that differ", str(len(verdict.changed))),
        ("noticed after, of killed processes", spread(result.detections_s(KILLS))),
        (
            "noticed after, of exceptions and cut links, the wait for their step included",
            spread(result.detections_s(TOLD)),
        ),
        (
            f"noticed after, of hangs and lost messages (step_timeout_s={config.step_timeout_s:g})",
            spread(result.detections_s(HANGS)),
        ),
        ("whole again after", spread(wholes)),
        ("stall of a stream at a loss", spread(result.stalls_s)),
        (
            "output tokens/s",
            f"{result.calm_rate:.0f} undisturbed, {result.storm_rate:.0f} in the storm, "
            f"{result.whole_rate:.0f} of it while whole",
        ),
        ("KV blocks held at the end", str(result.held_blocks)),
        ("left behind", "; ".join(result.left_behind) or "nothing"),
    ]
