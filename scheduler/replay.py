"""Runs a journal through a new scheduler and names every decision that differs."""

from collections.abc import Iterable

from scheduler.config import SchedulerConfig
from scheduler.journal import (
    Aborted,
    Applied,
    Expired,
    GroupAdded,
    GroupDrained,
    GroupLost,
    Opened,
    Planned,
    Record,
    Submitted,
    encode_record,
)
from scheduler.scheduler import Scheduler


def replay(records: Iterable[Record]) -> list[str]:
    """Feed the inputs of `records` to a scheduler made the same way.

    Returns:
        One line per record that the new scheduler would have written differently; none if
        it decided the same throughout.

    Raises:
        ValueError: the journal does not begin with its opening record.
    """
    differences: list[str] = []
    written: list[Record] = []
    scheduler: Scheduler | None = None
    for number, record in enumerate(records):
        written.clear()
        if isinstance(record, Opened):
            scheduler = Scheduler(
                SchedulerConfig(**record.config),  # type: ignore[arg-type]  # made by asdict
                record.model,
                written.append,
            )
        elif scheduler is None:
            raise ValueError("a journal must begin with an `opened` record")
        else:
            _feed(scheduler, record)
        if [encode_record(item) for item in written] != [encode_record(record)]:
            differences.append(f"record {number}: was {record}, is {written}")
    return differences


def _feed(scheduler: Scheduler, record: Record) -> None:
    match record:
        case GroupAdded():
            scheduler.add_group(record.group, record.epoch, record.num_blocks, record.now)
        case GroupDrained():
            scheduler.drain_group(record.group, record.now, drains=record.drains)
        case GroupLost():
            scheduler.lose_group(record.group, record.now, record.failure)
        case Submitted():
            scheduler.submit(record.request, record.client, record.now)
        case Aborted(handles=None):
            scheduler.abort_client(record.client, record.now)
        case Aborted():
            scheduler.abort(record.client, record.handles or [], record.now)
        case Expired():
            scheduler.end_early(record.serials, record.finish, record.message, record.now)
        case Planned():
            scheduler.plan(record.group, record.now)
        case Applied():
            scheduler.apply(record.group, record.result, record.now)
        case Opened():
            raise AssertionError("handled by the caller")
