"""A service with API keys, and a browser on its page; tests are skipped without a browser."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from docs.generate.browser import find_browser, open_browser
from tests.e2e.service import Service
from tests.models_fixture import ModelDirs

_HERE = Path(__file__).parent

OPERATOR, ALICE = "sk-operator", "sk-alice"

expect.set_options(timeout=20_000)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium is here")
    with open_browser(path) as browser:
        yield browser


@pytest.fixture(scope="session")
def service(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:  # noqa: ARG001 - no service without one
    model = ModelDirs(tmp_path_factory.mktemp("models")).get("llama", max_position_embeddings=16384)
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text(f'[[keys]]\nkey = "{ALICE}"\ntenant = "alice"\n')
    flags = [f"--api-key={OPERATOR}", f"--api-keys-file={keys}"]
    folder = tmp_path_factory.mktemp("q")
    with Service(folder, model, worker=["--num-blocks=1024"], router=flags) as service:
        yield service


@pytest.fixture
def refusals() -> tuple[int, ...]:
    """Statuses of calls that may be refused at any time; here calls without a key."""
    return (401,)


@pytest.fixture
def problems() -> list[str]:
    """The browser's errors and warnings; a test removes those that it expects."""
    return []


@pytest.fixture
def locked(
    browser: Browser, service: Service, problems: list[str], refusals: tuple[int, ...]
) -> Iterator[Page]:
    """The page before a key was entered."""
    context = browser.new_context(viewport={"width": 1200, "height": 1000})
    page = context.new_page()
    page.set_default_timeout(20_000)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "console",
        lambda message: problems.append(message.text) if message.type == "error" else None,
    )
    page.goto(f"{service.url}/ui")
    yield page
    context.close()
    # The browser itself logs each refused call.
    known = [f"status of {status}" for status in refusals]
    assert [text for text in problems if not any(each in text for each in known)] == []


@pytest.fixture
def page(locked: Page) -> Page:
    """The page as an operator sees it."""
    give_key(locked, OPERATOR)
    return locked


def give_key(page: Page, key: str) -> None:
    page.fill("#key", key)
    page.click("#key-form button")
    page.wait_for_selector("#key-form", state="hidden")
