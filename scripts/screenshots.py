"""Take the pictures of the page that docs/ shows, from the real model at work.

    python -m scripts.screenshots

Starts a `stoker serve` of its own with two worker groups, puts a load of chats on it that share
long beginnings, and writes docs/playground.png and docs/live.png. Needs Chromium and the fetched
model.
"""

import random
import sys
import threading
from pathlib import Path

from playwright.sync_api import Page

from tests.browser import open_browser, open_page
from tests.system.api.serving import Serving

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "smollm2-135m-instruct"
NUM_CHATS = 6
"""At once, each followed by another."""
WATCH_MS = 60_000
MANNERS = (
    "You answer briefly, kindly and in plain words, and never make up facts. " * 8,
    "You are a poet of the old school, who speaks of everything in rhymes. " * 8,
)
TOPICS = ("tides", "bread", "bridges", "bees", "clocks", "rivers", "glass", "moss")


def chat_on(served: Serving, seed: int, is_over: threading.Event) -> None:
    """One chat after the other, of different lengths."""
    draw = random.Random(seed)
    with served.http() as http:
        while not is_over.is_set():
            topic = draw.choice(TOPICS)
            messages = [
                {"role": "system", "content": MANNERS[seed % len(MANNERS)]},
                {"role": "user", "content": f"Tell me of {topic}. " * draw.randint(1, 30)},
            ]
            body = {"model": MODEL.name, "messages": messages, "max_tokens": draw.randint(8, 60)}
            http.post("/v1/chat/completions", json=body)
            is_over.wait(draw.random() * 2)


def show_playground(page: Page) -> None:
    page.get_by_label("Show how sure the model was").check()
    page.get_by_label("temperature", exact=True).fill("0.3")
    page.get_by_label("max_tokens").fill("90")
    page.get_by_label("seed").fill("3")
    page.get_by_label("Message").fill("Explain in two sentences why the sky is blue.")
    page.keyboard.press("Enter")
    page.locator("#chat-status", has_text="answered").wait_for()
    page.locator(".strip").focus()
    for _ in range(20):
        page.keyboard.press("ArrowLeft")


def show_live(page: Page) -> None:
    page.get_by_role("link", name="Live").click()
    page.wait_for_timeout(WATCH_MS)


def main() -> int:
    is_over = threading.Event()
    options = ("--num-groups=2", "--num-kv-blocks=96", f"--served-model-name={MODEL.name}")
    with Serving(MODEL, *options) as served, open_browser() as browser:
        served.wait_up()
        with open_page(browser, served.base_url, key=served.api_key, height=800) as page:
            show_playground(page)
            page.screenshot(path=ROOT / "docs" / "playground.png")
            chats = [
                threading.Thread(target=chat_on, args=(served, seed, is_over))
                for seed in range(NUM_CHATS)
            ]
            for chat in chats:
                chat.start()
            show_live(page)
            page.screenshot(path=ROOT / "docs" / "live.png", full_page=True)
        is_over.set()
        for chat in chats:
            chat.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
