"""Events as lines of key=value pairs."""

import io

from cluster.logs import EventLog, event_line, show_events


def test_a_line_is_the_event_and_its_fields() -> None:
    assert event_line("group_ready", {"group": 0, "share": 0.123456}) == (
        "group_ready group=0 share=0.1235"
    )


def test_values_that_are_not_plain_words_are_quoted() -> None:
    assert event_line("failed", {"error": 'no "x"\nhere', "label": ""}) == (
        'failed error="no \\"x\\"\\nhere" label=""'
    )


def test_ids_of_a_log_come_with_each_event() -> None:
    stream = io.StringIO()
    show_events("engine", "info", stream)
    log = EventLog("part", group=1).with_ids(rank=2)
    log.info("ready")
    log.debug("step")
    log.relay("worker 0.1.2", "as it is: 100%")
    log.relay("worker 0.1.2", "01:44:50.403 ERROR   worker 0.1.2 worker_failed rank=2")
    log.relay("worker 0.1.2", "01:44:50.403 DEBUG   worker 0.1.2 step number=9")
    show_events("test", "error", io.StringIO())

    lines = stream.getvalue().splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == [
        "INFO    engine ready group=1 rank=2",
        "INFO    engine [worker 0.1.2] as it is: 100%",
        "ERROR   engine [worker 0.1.2] worker_failed rank=2",
    ]
