"""The page in a real browser over scripted engines: what a real one seldom does."""

import json
from collections.abc import Iterator

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect

from cluster.messages.reports import GroupLoad, StepNews
from cluster.messages.sockets import ToClient
from scheduler.arrays import int32
from scheduler.request import Ended, Finish, Rejection, Request
from tests.browser import WAIT_MS, open_browser, open_page
from tests.cluster.api.conftest import StartRig
from tests.cluster.api.rig import ApiRig, script_of, spoken
from tests.cluster.frontend.fake_engine import make_info, tokens
from tests.cluster.frontend.tiny_tokenizers import make_tokenizer

pytestmark = pytest.mark.browser

TOKENIZER = make_tokenizer("llama3_like")
LONG = make_info(max_model_len=2048)
HTML = '<img src=x onerror="alert(1)"><b>bold</b> & <script>alert(2)</script>'


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=WAIT_MS)
    with open_browser() as browser:
        yield browser


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def is_over(page: Page, how: str = "answered") -> None:
    expect(page.locator("#chat-status")).to_have_text(how)


def news(rig: ApiRig, *, step: int, groups: tuple[int, ...] = (0, 1), **columns: object) -> None:
    """One step of each group."""
    count = len(groups)
    rig.engine.send(
        StepNews(
            uptime_s=100.0 + step,
            num_waiting=2,
            groups=tuple(
                GroupLoad(group=group, num_running=3 + group, num_blocks=64, num_used_blocks=16)
                for group in groups
            ),
            group=int32(groups),
            step=int32([step] * count),
            age_s=np.zeros(count, dtype=np.float32),
            compute_s=np.full(count, 0.02, dtype=np.float32),
            decode_tokens=int32([3 + group for group in groups]),
            new_tokens=int32([3 + group for group in groups]),
            running=int32([3 + group for group in groups]),
            **columns,  # type: ignore[arg-type]
        )
    )


def test_what_looks_like_html_is_shown_as_text(browser: Browser, start_rig: StartRig) -> None:
    rig = start_rig(script=script_of(TOKENIZER, HTML), info=LONG)
    with open_page(browser, rig.url) as page:
        ask(page, HTML)
        is_over(page)

        assert page.locator(".asked .body").inner_text() == HTML
        assert page.locator(".answer .body").inner_text() == HTML
        assert page.locator("main .message img, main .message b").count() == 0


@pytest.mark.slow
def test_only_what_was_set_is_sent(browser: Browser, start_rig: StartRig) -> None:
    rig = start_rig(script=script_of(TOKENIZER, "yes"), info=LONG)
    with open_page(browser, rig.url) as page:
        with page.expect_request("**/v1/chat/completions") as plain:
            ask(page, "one")
        is_over(page)
        page.get_by_label("System prompt").fill("be brief")
        page.get_by_label("temperature, as a slider").fill("0.5")
        for name, value in {"top_k": "5", "seed": "7", "frequency_penalty": "0.5"}.items():
            page.get_by_label(name, exact=True).fill(value)
        with page.expect_request("**/v1/chat/completions") as full:
            ask(page, "two")
        is_over(page)

    first, second = (json.loads(each.value.post_data or "") for each in (plain, full))
    assert first == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "one"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    roles = ["system", "user", "assistant", "user"]
    assert [message["role"] for message in second["messages"]] == roles
    asked = {name: second[name] for name in second if name not in first}
    assert asked == {"temperature": 0.5, "top_k": 5, "seed": 7, "frequency_penalty": 0.5}


def test_a_refusal_says_why_and_when_to_come_back(browser: Browser, start_rig: StartRig) -> None:
    def refuse(request: Request) -> list[ToClient]:
        return [
            Rejection(
                handle=request.handle,
                reason="queue_full",
                message="512 requests wait, max_waiting_requests is 512",
                retry_after_s=6.5,
            )
        ]

    rig = start_rig(script=refuse, info=LONG)
    with open_page(browser, rig.url, may_fail=("429",)) as page:
        ask(page, "hello")
        is_over(page, "failed")
        error = page.locator(".answer .error").inner_text()
        page.get_by_role("button", name="Retry").click()
        is_over(page, "failed")

        assert "512 requests wait, max_waiting_requests is 512" in error
        assert "Try again in 7 s" in error
        assert page.locator(".answer").count() == 1


@pytest.mark.slow
def test_an_answer_that_breaks_off_keeps_its_text_and_says_why(
    browser: Browser, start_rig: StartRig
) -> None:
    def break_off(request: Request) -> list[ToClient]:
        ids = TOKENIZER.encode(" the quick brown", add_special_tokens=False)
        why = "rank 1 of group 0 failed at step 9"
        ended = (Ended(handle=request.handle, message=why),)
        begun = spoken(request, ids, finish=Finish.NOT_YET)
        return [*begun[:-1], tokens(request.handle, [], Finish.ERROR, ended=ended)]

    rig = start_rig(script=break_off, info=LONG)
    with open_page(browser, rig.url) as page:
        ask(page, "go on")
        is_over(page, "failed")

        assert "the quick" in page.locator(".answer .body").inner_text()
        assert "rank 1 of group 0 failed" in page.locator(".answer .error").inner_text()


def test_groups_are_shown_together_or_alone(browser: Browser, start_rig: StartRig) -> None:
    rig = start_rig(info=LONG)
    with open_page(browser, f"{rig.url}#live") as page:
        expect(page.locator("#ticker")).to_contain_text("running")
        news(rig, step=1)
        expect(page.locator("#groups tr")).to_have_count(2)
        for step in range(2, 6):
            news(rig, step=step, first_token_s=np.asarray([0.25], dtype=np.float32))
        running = page.locator("[data-figure=running]")
        expect(running).to_have_text("7")
        page.get_by_label("group", exact=True).select_option("1")
        expect(running).to_have_text("4")
        scope = page.get_by_role("slider", name="Steps")
        expect(scope).to_have_attribute("aria-valuemax", "4")
        scope.focus()
        page.keyboard.press("Home")
        readout = page.locator("#scope-readout").inner_text()
        page.get_by_role("button", name="Pause").click()
        news(rig, step=6)
        expect(page.locator("#ticker")).to_contain_text("tok/s")

        assert readout.startswith("step 1 · group 1 · 4 decode · 0 prefill · 4 running")
        assert page.locator("[data-figure=ttft]").inner_text() == "250 ms"
        assert page.locator("[data-figure=kv]").inner_text() == "25 %"
        assert scope.get_attribute("aria-valuemax") == "4"


@pytest.mark.slow
def test_the_bar_says_when_the_engine_is_gone(browser: Browser, start_rig: StartRig) -> None:
    rig = start_rig(info=LONG)
    with open_page(browser, rig.url) as page:
        ticker = page.locator("#ticker")
        expect(ticker).to_contain_text("running")
        rig.engine.close()
        expect(ticker).to_contain_text("engine not ready")
        assert ticker.get_attribute("data-state") == "unknown"
