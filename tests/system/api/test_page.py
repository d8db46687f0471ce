"""The page in a real browser, on the real model: statement 8 of part 2."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from stoker import Client
from tests.browser import WAIT_MS, fits, open_browser, open_page
from tests.system.api.serving import Serving
from tests.system.served import settled

pytestmark = [pytest.mark.browser, pytest.mark.model]

PHONE = {"width": 320, "height": 640}
ENDLESS = "Count from one to one thousand, and name each number."
"""Greedily, the model goes on with this for hundreds of tokens."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=WAIT_MS)
    with open_browser() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, served: Serving, engine_client: Client) -> Iterator[Page]:
    """The page with its key; nothing of the test may be left in the engine after it."""
    with opened(browser, served) as page:
        yield page
    settled(engine_client)


def opened(browser: Browser, served: Serving, **size: int) -> AbstractContextManager[Page]:
    return open_page(browser, served.base_url, key=served.api_key, **size)


def ask(page: Page, text: str, *, max_tokens: int = 24) -> None:
    page.get_by_label("max_tokens").fill(str(max_tokens))
    page.get_by_label("temperature", exact=True).fill("0")
    page.get_by_label("Message").fill(text)
    page.get_by_role("button", name="Send").click()


def pieces(page: Page) -> int:
    return page.locator(".answer").last.locator(".piece").count()


def load(served: Serving, count: int, max_tokens: int) -> list[int]:
    """Streams that run at once; their statuses."""

    def one(number: int) -> int:
        with served.http() as http:
            body = {"model": served.model, "prompt": f"Tale {number}:", "max_tokens": max_tokens}
            return http.post("/v1/completions", json=body | {"ignore_eos": True}).status_code

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def test_an_answer_streams_and_ends_with_its_timing(page: Page) -> None:
    ask(page, "Count from one to twenty.", max_tokens=40)
    expect(page.locator(".answer.growing .piece").nth(2)).to_be_visible()
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    expect(page.locator("#chat-status")).to_have_text("answered")

    figures = page.locator(".figures").inner_text()
    bars = page.get_by_role("slider", name="Timing")
    assert re.search(r"first token [\d.]+ m?s · [\d.]+ tokens/s · \d+ tokens out · \d+ in", figures)
    assert int(bars.get_attribute("aria-valuemax") or 0) == pieces(page) > 2
    assert page.locator(".answer .body").inner_text().strip()


def test_stop_ends_the_answer_and_frees_the_engine(page: Page, engine_client: Client) -> None:
    ask(page, ENDLESS, max_tokens=1500)
    expect(page.locator(".answer .piece").nth(3)).to_be_visible()
    assert engine_client.status().num_running == 1
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#chat-status")).to_have_text("stopped")

    assert settled(engine_client).num_running == 0
    assert "stopped by you" in page.locator(".figures").inner_text()
    expect(page.locator("#ticker")).to_contain_text("0 running")
    assert pieces(page) < 1500


@pytest.mark.slow
def test_retry_answers_anew_and_clear_forgets(page: Page) -> None:
    ask(page, "Say hello.", max_tokens=4)
    expect(page.locator("#chat-status")).to_have_text("answered")
    first = page.locator(".answer .body").inner_text()
    page.get_by_role("button", name="Retry").click()
    expect(page.locator(".figures")).to_contain_text("of them cached")

    assert page.locator(".answer").count() == 1
    assert page.locator(".answer .body").inner_text() == first  # greedy
    page.get_by_role("button", name="Clear").click()
    expect(page.get_by_role("heading", name="Ask the model something")).to_be_visible()
    assert page.locator(".message").count() == 0


@pytest.mark.slow
def test_each_token_can_be_asked_how_sure_the_model_was(page: Page) -> None:
    page.get_by_label("Show how sure the model was").check()
    ask(page, "Name a colour.", max_tokens=6)
    expect(page.locator("#chat-status")).to_have_text("answered")
    page.locator(".answer .piece").first.hover()

    expect(page.locator(".answer .readout")).to_have_text(
        re.compile(r'^1 · ".*" · .* to the first · \d+ %, or ".*" [<\d ]+ %')
    )


def test_the_live_view_moves_while_a_load_runs(page: Page, served: Serving) -> None:
    page.get_by_role("link", name="Live").click()
    scope = page.get_by_role("slider", name="Steps")
    running = page.locator("[data-figure=running]")
    expect(running).to_have_text("0")
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(load, served, 3, 40)
        expect(running).to_have_text(re.compile("[1-3]"))
        expect(scope).to_have_attribute("aria-valuemax", re.compile(r"\d\d+"))
        before = page.locator("#lane-decode canvas").screenshot()
        assert answers.result() == [httpx.codes.OK] * 3
    expect(running).to_have_text("0")
    after = page.locator("#lane-decode canvas").screenshot()
    scope.focus()
    page.keyboard.press("End")

    assert before != after
    assert re.search(r"step \d+ · group 0 · \d decode", page.locator("#scope-readout").inner_text())
    assert page.locator("[data-figure=ttft]").inner_text().endswith("s")
    assert page.locator("#groups tr").count() == 1


def test_all_can_be_done_with_the_keyboard(page: Page, engine_client: Client) -> None:
    page.get_by_label("temperature", exact=True).fill("0")
    page.get_by_label("Message").focus()
    page.keyboard.type(ENDLESS)
    page.keyboard.press("Enter")
    expect(page.locator(".answer .piece").nth(3)).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#chat-status")).to_have_text("stopped")
    page.keyboard.press("Shift+Tab")
    on_strip = page.evaluate("document.activeElement.className")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    second = page.locator(".answer .readout").inner_text()
    page.reload()
    stops = []
    for _ in range(3):
        page.keyboard.press("Tab")
        stops.append(page.evaluate("document.activeElement.textContent"))
    page.keyboard.press("Enter")

    assert settled(engine_client).num_running == 0
    assert on_strip == "strip"
    assert second.startswith("2 · ")
    assert stops == ["Skip to the content", "Playground", "Live"]
    expect(page.get_by_role("region", name="Live view of the engine")).to_be_visible()


@pytest.mark.slow
def test_it_fits_a_phone(browser: Browser, served: Serving, engine_client: Client) -> None:
    with opened(browser, served, **PHONE) as page:
        page.locator("#settings summary").click()
        ask(page, "Say a word of forty letters.", max_tokens=24)
        expect(page.locator("#chat-status")).to_have_text("answered")
        fits_talk = fits(page)
        expect(page.locator(".answer .figures")).to_be_in_viewport()  # it followed the answer
        page.get_by_role("link", name="Live").click()
        expect(page.locator("#groups tr")).to_have_count(1)

        assert fits_talk
        assert fits(page)
    settled(engine_client)


@pytest.mark.slow
def test_a_key_is_asked_for_kept_in_the_tab_and_used(browser: Browser, served: Serving) -> None:
    with open_page(browser, served.base_url, may_fail=("401",)) as page:
        asked = page.get_by_label("This server asks for a key")
        asked.fill("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("this key is not one of the server's")
        asked.fill(served.api_key)
        page.keyboard.press("Enter")
        expect(page.locator("#ticker")).to_contain_text("running")
        page.reload()
        expect(page.locator("#ticker")).to_contain_text("running")

        assert asked.is_hidden()
