"""A real model is reloaded, scaled and upgraded while streams go on: none is the worse for it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.api.serving import Serving
from tests.system.under_load import Load, Tally, wait_until_over

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(3000)]

LIMIT_S = 600.0
"""For each change, on a machine that does other things too."""


@pytest.fixture
def serving(smollm2: Path, no_leaks: None, request: pytest.FixtureRequest) -> Iterator[Serving]:
    options = ["--api-servers=2", "--num-threads=1", "--drain-s=120", f"--groups={request.param}"]
    with Serving(smollm2, *options) as serving:
        yield serving.wait_up()


def check(tally: Tally, what: str) -> None:
    print(tally.line(what))
    assert tally.broken == []
    assert tally.differing == []
    assert tally.refused == []
    assert tally.num_whole


@pytest.mark.parametrize("serving", [1, 2], indirect=True, ids="{}_groups".format)
def test_reload_and_upgrade_under_load_drop_no_stream_and_change_no_token(
    serving: Serving,
) -> None:
    processes = {child.pid for child in serving.family}
    with serving.http() as http, Load(serving) as load:
        load.so_far()
        assert http.post("/admin/reload", json={}).status_code == 202
        reloaded = wait_until_over(http, "/admin/reload", LIMIT_S)
        between = load.so_far()
        assert http.post("/admin/upgrade").status_code == 202
        upgraded = wait_until_over(http, "/admin/upgrade", LIMIT_S)
        during = load.so_far()
    after = load.tally

    check(between, "reload")
    check(during, "upgrade")
    check(after, "after")
    assert reloaded["failure"] is None
    assert (upgraded["failure"], upgraded["num_done"]) == (None, 1)
    serving.wait_for("upgrade_ended")
    assert not processes & {child.pid for child in serving.family}
    serving.ask_to_end()
    assert serving.wait() == 0
