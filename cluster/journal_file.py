"""The scheduler's records on disk: MessagePack maps, one after the other."""

from pathlib import Path

from cluster.logs import EventLog
from scheduler.journal import Record, encode_record


class JournalError(ValueError):
    """The journal cannot be begun; says where and why."""


class JournalFile:
    """Appends records; a disk that fails ends the journal, never the engine."""

    def __init__(self, path: Path, log: EventLog) -> None:
        """Begin anew at `path`.

        Raises:
            JournalError: it cannot be written.
        """
        self._path = path
        self._log = log
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise JournalError(
                f"journal={path} cannot be written: {error.strerror}. Choose another file"
            ) from error

    def write(self, record: Record) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(encode_record(record))
        except OSError as error:
            self._log.error("journal_ended", path=self._path, error=error)
            self._end()

    def close(self) -> None:
        if not self._file.closed:
            self._end()

    def _end(self) -> None:
        try:
            self._file.close()  # also writes what is buffered
        except OSError as error:
            self._log.error("journal_incomplete", path=self._path, error=error)
