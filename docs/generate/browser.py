"""Opens the web page in a Chromium of this machine, without a window; downloads none.

Run as a program it only says which one, and fails if there is none.
"""

import contextlib
import shutil
import sys
from collections.abc import Iterator
from typing import Final

from playwright.sync_api import Browser, sync_playwright

_NAMES: Final = ("chromium", "chromium-browser", "google-chrome")

# Containers give it neither user namespaces nor much of /dev/shm; it sees nothing but our own page.
_ARGUMENTS: Final = ("--no-sandbox", "--disable-dev-shm-usage")


def find_browser() -> str | None:
    """Return the path of a Chromium; None: there is none."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


@contextlib.contextmanager
def open_browser(path: str) -> Iterator[Browser]:
    """Run it for the time of the block."""
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
