"""Starts the sides of each stage and lets them answer its traces in turn: A B A B."""

import contextlib
import fcntl
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.peers.bars import Bar, Stage, turns_of
from bench.peers.environments import PeerMissing
from bench.peers.record import Launch, Replays, Results
from bench.peers.side import Side, SideFailed, Stopped

WARM_TOKENS = 4
WARM_TURN = 1_000_000
"""Its prompts are those of no run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much is measured, and how long anything may take."""

    repeats: int = 3
    run_s: float = 240.0
    start_s: float = 600.0


@dataclass(slots=True, kw_only=True)
class Comparison:
    """One run of the comparison: what it starts is ended by `close` or `kill`."""

    run_id: str
    commit: str
    start: Callable[[str], Side]
    trace_file: Callable[[str], Path]
    limits: Limits
    results: Results
    save: Callable[[], None]
    """Called after every run, so that whoever interrupts keeps what there is."""
    locks: Sequence[Path] = ()
    """Files whose locks are held while something is measured, the last also during a start."""
    _alive: dict[str, Side] = field(default_factory=dict)

    def run_stage(self, stage: Stage, bars: tuple[Bar, ...], skipped: Sequence[str]) -> None:
        """Measure what these bars want to know of a stage's sides."""
        turns = {
            trace: [side for side in sides if not is_skipped(side, skipped)]
            for trace, sides in turns_of(stage, bars).items()
        }
        for name in self._alive.keys() - {side for sides in turns.values() for side in sides}:
            self._alive.pop(name).close()
        for trace, sides in turns.items():
            for name in sides:
                if name not in self._alive and not self._has_failed(name):
                    self._launch(name)
            self._play(trace, [name for name in sides if name in self._alive])

    def _has_failed(self, name: str) -> bool:
        launch = self.results.launches.get(name)
        return launch is not None and launch.run_id == self.run_id and bool(launch.failure)

    def _launch(self, name: str) -> None:
        """Start a side; if it fails, that is what is kept of it."""
        say(f"starting {name}")
        launch = Launch(run_id=self.run_id, commit=self.commit)
        try:
            side = self._alive[name] = self.start(name)
            with held(self.locks[-1:]):
                side.wait_ready(self.limits.start_s)
        except (PeerMissing, SideFailed) as error:
            launch.failure = str(error)
            say(f"{name}: {error}")
            if name in self._alive:
                self._alive.pop(name).close()
        else:
            launch.about, launch.start_s = side.about, side.start_s
            launch.peak_bytes = side.peak_bytes
            side.rest()
        self.results.launches[name] = launch
        self.save()

    def _play(self, trace: str, names: list[str]) -> None:
        playing = {name: self._replays(f"{name} {trace}") for name in names}
        for turn in range(-1, self.limits.repeats):
            for name, replays in playing.items():
                if replays.failure:
                    continue
                with held(self.locks):
                    self._take_turn(name, trace, turn, replays)
                if replays.seconds or replays.failure:
                    self.results.replays[f"{name} {trace}"] = replays
                    self.save()

    def _replays(self, key: str) -> Replays:
        """What this comparison has already from an earlier stage, or none."""
        found = self.results.replays.get(key)
        if found is not None and found.run_id == self.run_id:
            return found
        return Replays(run_id=self.run_id, commit=self.commit)

    def _take_turn(self, name: str, trace: str, turn: int, replays: Replays) -> None:
        """One run; the first (-1) is short, and only warms caches up."""
        path, side = self.trace_file(trace), self._alive[name]
        is_warm_up = turn < 0
        try:
            if is_warm_up:
                side.run(path, WARM_TURN, self.limits.run_s, WARM_TOKENS)
            else:
                replays.add(side.run(path, turn, self.limits.run_s))
                say(f"{name} {trace}: {replays.seconds[-1]:.2f} s")
        except SideFailed as error:
            replays.failure = str(error)
            say(f"{name} {trace}: {error}")
            if isinstance(error, Stopped):  # the side is gone with it
                del self._alive[name]
        launch = self.results.launches[name]
        launch.peak_bytes = max(launch.peak_bytes, side.peak_bytes)

    def kill(self) -> None:
        """End everything at once."""
        while self._alive:
            self._alive.popitem()[1].kill()

    def close(self) -> None:
        """Let everything end by itself."""
        while self._alive:
            self._alive.popitem()[1].close()


def is_skipped(side: str, skipped: Sequence[str]) -> bool:
    """Whether a side was left out by its own name or its peer's."""
    return any(side == name or side.startswith(f"{name}.") for name in skipped)


@contextlib.contextmanager
def held(locks: Sequence[Path]) -> Iterator[None]:
    """Hold these files' locks, for a machine on which several measure."""
    with contextlib.ExitStack() as until_end:
        for path in locks:
            file = until_end.enter_context(path.open("a"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
