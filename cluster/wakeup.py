"""Signals as something to wait for, beside sockets: a descriptor that becomes readable."""

import os
import signal
from collections.abc import Iterable


class SignalPipe:
    """Takes over some signals of this process; what has come is read where it suits.

    Only the main thread may make one. A SIGHUP that is ignored stays so (`nohup`). Handlers
    stay for the life of the process, so that a second signal cannot kill it half way.
    """

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        self.fd, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in signals:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            signal.signal(number, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def read(self) -> list[signal.Signals]:
        """The signals that came since the last look, in order."""
        try:
            return [signal.Signals(number) for number in os.read(self.fd, 4096)]
        except BlockingIOError:
            return []


class WakePipe:
    """Lets other threads end a wait. `wake` never blocks and may be called from anywhere."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def wake(self) -> None:
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return
