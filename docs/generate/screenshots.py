"""`python -m docs.generate.screenshots` takes the pictures in docs/screenshots.

They show the shipped model on a machine without a GPU and with very little memory, so that
sharing, eviction, preemption and swapping are visible.
"""

import contextlib
import io
import itertools
import random
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from playwright.sync_api import Browser, Page
from rich.console import Console

from docs.generate.browser import find_browser, open_browser
from quire.cli.commands.observe.top import title
from quire.cli.top.figures import take_snapshot
from quire.cli.top.view import draw
from quire.cli.up.service_dir import ServiceInfo, running_services
from quire.client import Client
from quire.client.types import SamplingParams
from quire.private_service import PrivateService

FOLDER: Final = Path(__file__).parents[1] / "screenshots"

_FLAGS: Final = {
    "device": "cpu",
    "num_blocks": 360,
    "max_num_seqs": 24,
    "host_kv_memory_gb": 0.02,
    "disk_kv_memory_gb": 0.03,
}
_WATCH_S: Final = 20.0
"""Time until the timeline has enough steps."""
_PROMPT: Final = 'def is_prime(n):\n    """Return whether n is a prime number."""\n'
_SHOWN_CHARS: Final = 250
_NUMBERS: Final = itertools.count()
_FONT: Final = re.compile(r"@font-face \{.*?\}", re.DOTALL)
"""Matches fonts, which are removed because a picture must not download anything."""


def main() -> int:
    """Take all pictures; return the exit code."""
    path = find_browser()
    if path is None:
        print("no Chromium is here: docs/screenshots stays as it is")
        return 0
    FOLDER.mkdir(exist_ok=True)
    with PrivateService(_FLAGS) as service, open_browser(path) as browser:
        info = next(it for it in running_services() if it.grpc_target == service.target)
        with _load(service.target, num_streams=16):
            _take_service(browser, info)
            _take_top(info)
        with _load(service.target, num_streams=3):
            _take_playground(browser, info)
    for file in sorted(FOLDER.iterdir()):
        print(f"docs/screenshots/{file.name}: {file.stat().st_size // 1000} kB")
    return 0


def _take_service(browser: Browser, info: ServiceInfo) -> None:
    page = _open(browser, info, height=1240)
    page.wait_for_selector("#sequences tr")
    page.wait_for_timeout(_WATCH_S * 1000)
    # The first block holds the prompts' common beginning.
    page.hover("canvas[data-tier=device]", position={"x": 5, "y": 5})
    page.wait_for_selector("#tooltip:not([hidden])")
    page.screenshot(path=FOLDER / "ui-service.png")
    page.close()


def _take_playground(browser: Browser, info: ServiceInfo) -> None:
    page = _open(browser, info, height=640)
    page.click("#tab-playground")
    page.fill("#prompt", _PROMPT)
    page.fill("#temperature", "0.7")
    page.fill("#repetition-penalty", "1.1")
    page.fill("#seed", "7")
    page.fill("#max-tokens", "900")
    page.click("#send")
    while len(page.text_content(".answer") or "") < _SHOWN_CHARS:
        page.wait_for_timeout(20)
    page.screenshot(path=FOLDER / "ui-playground.png")
    page.close()


def _take_top(info: ServiceInfo) -> None:
    console = Console(
        width=132,
        height=38,
        record=True,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
    )
    with Client(info.grpc_target) as client:
        before = take_snapshot(client, info, max_sequences=64)
        time.sleep(1.0)
        now = take_snapshot(client, info, max_sequences=64)
    console.print(draw(console, title(info.grpc_target, info), before, now))
    svg = console.export_svg(title="quire top", unique_id="top")
    (FOLDER / "top.svg").write_text(_FONT.sub("", svg))


def _open(browser: Browser, info: ServiceInfo, height: int) -> Page:
    page = browser.new_page(viewport={"width": 1200, "height": height}, color_scheme="light")
    page.goto(f"http://{info.http_address}/ui")
    return page


@contextlib.contextmanager
def _load(target: str, num_streams: int) -> Iterator[None]:
    """Run `num_streams` clients during the block, each with one request after another."""
    stop = threading.Event()
    with Client(target) as client:
        threads = [
            threading.Thread(target=_ask, args=(client, stop, random.Random(i)))  # noqa: S311
            for i in range(num_streams)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def _ask(client: Client, stop: threading.Event, chance: random.Random) -> None:
    while not stop.is_set():
        number = chance.randrange(1000)
        shared = '"""Reads settings from a file."""\n\nimport json\n\n\n' * chance.randint(1, 4)
        own = f"def read_{number}(path):\n" * chance.randint(0, 4)
        params = SamplingParams(
            max_tokens=chance.randrange(100, 500), temperature=0.8, ignore_eos=True, seed=number
        )
        n = chance.choice((1, 1, 1, 1, 3))
        pin_s = chance.choice((None, None, None, 10.0))
        name = f"job-{next(_NUMBERS)}"
        events = client.generate(shared + own, params, n=n, request_id=name, cache_pin_s=pin_s)
        for _ in events:
            if stop.is_set():
                break


if __name__ == "__main__":
    sys.exit(main())
