"""New code for a cluster that serves, in place: the engine core, the groups, the API servers.

    idle ──asked──> prepare ──the new core is loaded──> hand_over ──the old one has ended──┐
    idle <── servers <──each group has come back── renew <──a group serves with it── take_over

Nothing is there twice but one core and one API server at a time. Pure: it is told what happens, and
says what to do next; `failure` says why it was given up, which leaves what came so far as it is.
"""

from typing import Literal, TypeAlias

Phase: TypeAlias = Literal["idle", "prepare", "hand_over", "take_over", "renew", "servers"]

Step: TypeAlias = Literal["prepare", "hand_over", "renew", "replace_servers"]
"""What the supervisor has to do: load a new core beside the old one; let the old one end without
ending its requests; let the groups leave and come back, one by one; replace the API servers."""


class Upgrade:
    """One after the other, each from its beginning to its end."""

    def __init__(self, protocol: int) -> None:
        """
        Args:
            protocol: that everybody speaks who is not replaced at the same moment.
        """
        self._protocol = protocol
        self.phase: Phase = "idle"
        self.failure = ""
        """Of the last one"""

    @property
    def is_running(self) -> bool:
        return self.phase != "idle"

    @property
    def hands_over(self) -> bool:
        """Whether the engine is asked to end, and another one is to follow."""
        return self.phase == "hand_over"

    def begin(self) -> list[Step]:
        """Somebody asks for it; nothing if one runs."""
        if self.is_running:
            return []
        self.phase, self.failure = "prepare", ""
        return ["prepare"]

    def stands(self, protocol: int, version: str) -> list[Step]:
        """The new core is loaded, and waits for the place of the old one."""
        if self.phase != "prepare":
            return []
        if protocol != self._protocol:
            self.fail(
                f"version {version} speaks protocol {protocol}, what runs speaks {self._protocol}. "
                "Start the cluster again"
            )
            return []
        self.phase = "hand_over"
        return ["hand_over"]

    def fail(self, why: str) -> None:
        """It cannot go on."""
        self.phase, self.failure = "idle", why

    def engine_ended(self) -> None:
        """The core has ended, asked or not, and another one is begun with what there is by now."""
        if self.phase in ("hand_over", "renew"):
            self.phase = "take_over"

    def serves(self) -> list[Step]:
        """A group takes plans of the present core; those that do not yet come back as new ones."""
        if self.phase != "take_over":
            return []
        self.phase = "renew"
        return ["renew"]

    def renewed(self, failure: str) -> list[Step]:
        """Every group has come back; or one could not, and why."""
        if self.phase != "renew":
            return []
        if failure:
            self.fail(failure)
            return []
        self.phase = "servers"
        return ["replace_servers"]

    def replaced(self, failure: str = "") -> None:
        """So have the API servers, if there are any."""
        if self.phase == "servers":
            self.phase, self.failure = "idle", failure
