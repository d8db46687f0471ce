"""What the bench of recoveries reads out of a log."""

import pytest

from bench.recovery import print_phases

LINE = (
    "22:55:07.730 INFO    engine group_recovered group=0 epoch={epoch} reason=died rank=1 "
    "noticed_s=0.0{epoch} fenced_s=0.2 weights_s=1.5 ready_s=2.25 first_token_s=2.5 "
    'error="it last wrote: ready_s=99"'
)


def test_each_phase_is_told_by_its_median_and_its_worst(capsys: pytest.CaptureFixture[str]) -> None:
    log = "\n".join(["engine cluster_ready", *(LINE.format(epoch=n) for n in (1, 2, 9))])
    print_phases("warm", log, [2.0, 3.0, 4.0])
    told = capsys.readouterr().out
    assert "warm weights: 3 recoveries" in told
    assert "| noticed | 20 | 90 |" in told
    assert "| ready | 2250 | 2250 |" in told
    assert "paused" not in told
    assert "| a client's stall | 3000 | 4000 |" in told
