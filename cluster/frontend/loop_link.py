"""A connection to an engine that an asyncio loop watches, dialled again whenever it ends.

ZeroMQ's descriptors tell of changes, not of states. So each turn takes what has come, sends
what is to be sent, and has another turn follow if it sent something or did not take all.
"""

import asyncio
import traceback
from collections import deque
from collections.abc import Callable, Iterable

from cluster.errors import AddressError, KeyFileError, LinkLost, WireError
from cluster.frontend.engine_client import ClientConfig
from cluster.frontend.errors import EngineLost, ProtocolMismatch
from cluster.frontend.session import BadMessage
from cluster.links.dealer import DealerLink
from cluster.logs import EventLog
from cluster.messages.sockets import FromClient, ToClient
from cluster.wire import FROM_CLIENT, TO_CLIENT

MESSAGES_PER_TURN = 8
MOST_MESSAGES_PER_TURN = 32
"""Messages taken in before others on the loop have their turn: at first, and after turns that
did not take all. Tokens that come faster than they can be written thus leave in fewer and larger
chunks, which cost less, at the price of longer turns."""

SEND_TIMEOUT_S = 5.0
"""How long an engine that does not read is borne before the connection counts as lost."""


class LoopLink:
    """For one loop, not for threads. What is said on it is its owner's business."""

    def __init__(
        self,
        config: ClientConfig,
        *,
        hello: Callable[[], Iterable[FromClient]],
        take: Callable[[ToClient], Iterable[FromClient]],
        ended: Callable[[Exception, bool], None],
        log: EventLog,
    ) -> None:
        """
        Args:
            hello: what each new connection begins with.
            take: given each message that comes, returns what to send in consequence; it may
                raise what ends the connection.
            ended: told why a connection ended: `EngineLost`, after which another is dialled, or
                why none will be; and whether what was live may go on with another one.
        """
        self._config = config
        self._hello, self._take_message, self._ended = hello, take, ended
        self._log = log
        self.last_loss = ""
        """Why the connection before this one ended."""
        self.dead: Exception | None = None
        """Why nothing will ever work again."""
        self._link: DealerLink | None = None
        self._outbox: deque[bytes] = deque()
        self._is_turn_due = False
        self._turn_messages = MESSAGES_PER_TURN
        self._pause_s = config.shortest_redial_s
        self._redial: asyncio.TimerHandle | None = None
        self._send_limit: asyncio.TimerHandle | None = None

    def dial(self) -> None:
        """Begin, and go on until closed. Called once, on the loop."""
        assert self._link is None, "dialled twice"
        self._redial = None
        try:
            link = self._config.dial()
        except KeyFileError as error:  # there may be one again when there is an engine again
            self._lose(str(error))
            return
        except AddressError as error:
            self.give_up(error)
            return
        except Exception as error:  # no descriptors are left, say
            self._lose(f"cannot dial: {error}")
            return
        self._link = link
        loop = asyncio.get_running_loop()
        for fd in link.fds:
            loop.add_reader(fd, self._turn)
        self.send(self._hello())

    def was_of_use(self) -> None:
        """The engine could take requests: should it be lost, dial again soon."""
        self._pause_s = self._config.shortest_redial_s

    def send(self, messages: Iterable[FromClient]) -> None:
        """They leave at the end of this turn of the loop, or as soon as there is room.

        Raises:
            WireError: one is too large; none is sent.
            Exception: `dead`.
        """
        if self.dead is not None:
            raise self.dead
        frames = [FROM_CLIENT.encode(message) for message in messages]
        if frames:
            self._outbox.extend(frames)
            self._turn_soon()

    def give_up(self, error: Exception) -> None:
        """Hang up; nothing will work any more."""
        self.dead = self.dead or error
        if self._redial is not None:
            self._redial.cancel()
            self._redial = None
        self._hang_up()
        self._ended(self.dead, False)

    async def close(
        self, error: Exception, last_words: Iterable[FromClient], linger_s: float
    ) -> None:
        """Give up, but let the last words leave for `linger_s`."""
        link, self._link = self._link, None
        frames = [*self._outbox, *map(FROM_CLIENT.encode, last_words)]
        self.give_up(error)
        if link is None:
            return
        _unwatch(link)
        for frame in frames:
            if not link.offer(frame):
                break
        await asyncio.to_thread(link.close, linger_s)

    # Turns

    def _turn_soon(self) -> None:
        if not self._is_turn_due:
            self._is_turn_due = True
            asyncio.get_running_loop().call_soon(self._take_due_turn)

    def _take_due_turn(self) -> None:
        self._is_turn_due = False
        self._turn()

    def _turn(self) -> None:
        """Take in what has come and send what is to be sent, as far as it goes at once."""
        link = self._link
        if link is None:
            return
        try:
            if self._take_some(link):
                self._turn_messages = MESSAGES_PER_TURN
            else:
                self._turn_messages = min(2 * self._turn_messages, MOST_MESSAGES_PER_TURN)
                self._turn_soon()
            if link.why_not:
                raise LinkLost(link.why_not)
            self._flush(link)
        except (LinkLost, EngineLost) as error:
            self._lose(str(error))
        except (WireError, BadMessage) as error:  # what cannot be read would come again
            self._lose(str(error), may_go_on=False)
        except ProtocolMismatch as error:
            self.give_up(error)
        except Exception as error:
            self._log.error("client_turn_failed", error=traceback.format_exc())
            self._lose(f"the client itself failed: {error!r}", may_go_on=False)

    def _take_some(self, link: DealerLink) -> bool:
        """Take in a turn's messages; whether that was all that there were."""
        for _ in range(self._turn_messages):
            frame = link.take()
            if frame is None:
                return True
            self.send(self._take_message(TO_CLIENT.decode(frame)))
        return False

    def _flush(self, link: DealerLink) -> None:
        outbox = self._outbox
        while outbox and link.offer(outbox[0]):
            outbox.popleft()
            self._turn_soon()  # sending may have used up the wake-up for something to take
        if outbox and self._send_limit is None:
            self._send_limit = asyncio.get_running_loop().call_later(
                SEND_TIMEOUT_S, self._give_up_sending, link, outbox[0]
            )

    def _give_up_sending(self, link: DealerLink, frame: bytes) -> None:
        self._send_limit = None
        if self._outbox and self._outbox[0] is frame:
            self._lose(f"the engine has not taken a message for {SEND_TIMEOUT_S:g} s")
        else:
            self._flush(link)

    # The end of a connection

    def _lose(self, reason: str, *, may_go_on: bool = True) -> None:
        self.last_loss = reason
        self._hang_up()
        lost = EngineLost(f"lost the engine at {self._config.address}: {reason}")
        self._ended(lost, may_go_on)
        if self.dead is None and self._redial is None:
            self._redial = asyncio.get_running_loop().call_later(self._pause_s, self.dial)
            self._pause_s = min(2 * self._pause_s, self._config.longest_redial_s)

    def _hang_up(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            _unwatch(link)
            link.close()
        self._outbox.clear()
        if self._send_limit is not None:
            self._send_limit.cancel()
            self._send_limit = None


def _unwatch(link: DealerLink) -> None:
    loop = asyncio.get_running_loop()
    for fd in link.fds:
        loop.remove_reader(fd)
