"""A connection for faults and looks, which dials again when the engine is what was broken."""

import time
from pathlib import Path

from cluster.errors import LinkLost
from cluster.keys import read_key_file
from cluster.links.dealer import DealerLink
from cluster.links.sockets import LinkLimits
from cluster.messages.clients import ClientHello
from cluster.messages.faults import FaultInjected, InjectFault
from cluster.messages.reports import Status, StatusRequest
from cluster.messages.sockets import FromClient
from cluster.wire import FROM_CLIENT, PROTOCOL_VERSION, TO_CLIENT
from scheduler.errors import InvalidRequest
from stoker.running import key_file_for

ANSWER_S = 1.0
"""An engine that does not answer for so long is taken for one that hangs, and is asked again."""


class ChaosLink:
    """To one cluster's front socket. Use it with `with`."""

    def __init__(self, address: str, *, key_file: str | None = None) -> None:
        self._address = address
        path = key_file_for(address, key_file)
        self._keys = read_key_file(Path(path)) if path else None
        self._link: DealerLink | None = None

    def inject(self, asked: InjectFault, timeout_s: float = 10.0) -> FaultInjected | None:
        """Let a fault happen; None if the engine was gone before it could answer.

        Raises:
            InvalidRequest: the cluster does not allow it, or nobody is meant.
        """
        try:
            answer = self._ask(asked, FaultInjected, timeout_s)
        except LinkLost:
            self._hang_up()
            return None
        if not isinstance(answer, FaultInjected):
            self._hang_up()  # what comes late must not answer a later question
            return None
        if answer.refusal:
            raise InvalidRequest(answer.refusal)
        return answer

    def look(self, timeout_s: float = ANSWER_S) -> Status | None:
        """How the cluster is; None if the engine does not say."""
        try:
            status = self._ask(StatusRequest(), Status, timeout_s)
        except LinkLost:
            self._hang_up()
            return None
        if not isinstance(status, Status):
            self._hang_up()
            return None
        return status

    def _ask(
        self, question: FromClient, kind: type[FaultInjected] | type[Status], timeout_s: float
    ) -> FaultInjected | Status | None:
        link = self._dial()
        link.send(FROM_CLIENT.encode(question))
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            frame = link.receive(left)
            answer = None if frame is None else TO_CLIENT.decode(frame)
            if isinstance(answer, kind):
                return answer
        return None

    def _dial(self) -> DealerLink:
        if self._link is None:
            self._link = DealerLink(
                self._address, LinkLimits(max_message_bytes=TO_CLIENT.max_bytes), self._keys
            )
            hello = ClientHello(protocol=PROTOCOL_VERSION, label="chaos")
            self._link.send(FROM_CLIENT.encode(hello))
        return self._link

    def _hang_up(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def __enter__(self) -> "ChaosLink":
        return self

    def __exit__(self, *_: object) -> None:
        self._hang_up()
