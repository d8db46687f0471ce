"""The journal on disk."""

from pathlib import Path

import msgpack
import pytest

from cluster.journal_file import JournalError, JournalFile
from cluster.logs import EventLog
from scheduler.journal import GroupAdded, GroupLost

ADDED = GroupAdded(now=1.0, group=0, epoch=1, num_blocks=8)


def test_records_are_maps_one_after_the_other(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = JournalFile(path, EventLog("test"))
    journal.write(ADDED)
    journal.write(GroupLost(now=2.0, group=0))
    journal.close()
    journal.close()

    with path.open("rb") as file:
        events = [record["event"] for record in msgpack.Unpacker(file)]
    assert events == ["group_added", "group_lost"]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"journal=.*/no/journal cannot be written: No such"):
        JournalFile(tmp_path / "no" / "journal", EventLog("test"))


def test_a_full_disk_ends_the_journal_and_nothing_else() -> None:
    journal = JournalFile(Path("/dev/full"), EventLog("test"))
    for _ in range(1000):
        journal.write(ADDED)
    journal.close()
