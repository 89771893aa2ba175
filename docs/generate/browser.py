"""Opens the web page in a headless Chromium of this machine.

Run as a program, it prints the path of Chromium, and fails if there is none.
"""

import contextlib
import shutil
import sys
from collections.abc import Iterator
from typing import Final

from playwright.sync_api import Browser, sync_playwright

_NAMES: Final = ("chromium", "chromium-browser", "google-chrome")

# Containers have no user namespaces and little /dev/shm. The browser opens only our own page.
_ARGUMENTS: Final = ("--no-sandbox", "--disable-dev-shm-usage")


def find_browser() -> str | None:
    """Return the path of a Chromium, or None."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


@contextlib.contextmanager
def open_browser(path: str) -> Iterator[Browser]:
    """Run a browser during the block."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*_ARGUMENTS])
        try:
            yield browser
        finally:
            browser.close()


if __name__ == "__main__":
    found = find_browser()
    print(found or "there is no Chromium")
    sys.exit(found is None)
