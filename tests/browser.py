"""A real browser for tests of the page: Chromium as the system has it, driven by Playwright."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")
WAIT_MS = 30_000
"""For what the page shall show, on a machine that does other things too."""


def chromium() -> str | None:
    """The path of a Chromium, if there is one; on Debian the package `chromium` brings it."""
    return next((path for name in CHROMIUMS if (path := shutil.which(name))), None)


@contextmanager
def open_browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def open_page(
    browser: Browser,
    url: str,
    *,
    key: str = "",
    width: int = 1280,
    height: int = 860,
    scheme: str = "light",
    may_fail: tuple[str, ...] = (),
) -> Iterator[Page]:
    """The page at `url`; in the end it must have written no error and asked no other host.

    Args:
        key: kept for it already; empty: it has to ask.
        may_fail: words of errors that the browser may write, such as a status that we provoke.
    """
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,  # type: ignore[arg-type]
        reduced_motion="no-preference",
    )
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    errors: list[str] = []
    hosts: set[str] = set()

    def note_message(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            errors.append(message.text)

    def note_request(request: Request) -> None:
        hosts.add(urlsplit(request.url).netloc)

    page.on("console", note_message)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", note_request)
    if key:
        page.add_init_script(f"sessionStorage.setItem('stoker-key', {key!r})")
    try:
        page.goto(url)
        yield page
    finally:
        context.close()
    unexpected = [error for error in errors if not any(word in error for word in may_fail)]
    assert not unexpected, f"the page wrote errors: {unexpected}"
    assert hosts == {urlsplit(url).netloc}


def fits(page: Page) -> bool:
    """Whether the page can be read without scrolling sideways."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))
