"""The web page while workers start and stop."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.test_page import pixels
from tests.e2e.child import eventually
from tests.e2e.generation import generate_request, read
from tests.e2e.two_workers import TwoWorkers
from tests.models_fixture import ModelDirs


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    dirs = ModelDirs(tmp_path_factory.mktemp("models"))
    return dirs.get("llama"), dirs.get("qwen3", seed=5)


@pytest.fixture
def service(
    browser: Browser,  # noqa: ARG001 - no service without one
    models: tuple[Path, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[TwoWorkers]:
    """A service for each test, because tests change its workers."""
    with TwoWorkers(
        tmp_path_factory.mktemp("q"), models[0], worker=("--num-blocks=128",)
    ) as service:
        service.wait_until_both_are_attached()
        yield service


@pytest.fixture
def refusals() -> tuple[int, ...]:
    """Statuses that the page's calls may get while a worker is lost or unloaded."""
    return (503,)


@pytest.fixture
def page(locked: Page) -> Page:
    """The page of a service without keys."""
    expect(locked.locator("#status")).to_have_text("live")
    return locked


def choose(page: Page, target: str) -> None:
    page.select_option("#worker", target)
    expect(page.locator(".tier h3")).to_contain_text("device: 128 blocks of 16 tokens")


def expect_nothing_of_it(page: Page) -> None:
    expect(page.locator(".tier")).to_have_count(0)
    expect(page.locator("#preemptions")).to_have_text("–")  # noqa: RUF001 - what the page has
    expect(page.locator("#rates")).to_be_empty()


def test_an_unloaded_worker_is_called_so_until_it_is_back(
    page: Page, service: TwoWorkers, models: tuple[Path, Path]
):
    first, other = service.targets
    note, chosen = page.locator("#map-note"), page.locator("#worker option:checked")
    choose(page, first)
    at_rest = pixels(page, "#timeline")
    # If nothing runs, the first worker gets the request.
    read(service.stub.Generate(generate_request([5] * 9, max_tokens=20, ignore_eos=True)))
    expect(page.locator("#rates")).to_contain_text("steps/s")

    assert service.run("unload", first) == 0
    expect(chosen).to_have_text("worker.sock (unloaded)")
    expect(note).to_contain_text("unloaded")
    expect_nothing_of_it(page)
    assert pixels(page, "#timeline") == at_rest
    choose(page, other)
    expect(note).to_be_hidden()
    assert page.locator("#worker option").all_text_contents() == [
        "other.sock",
        "worker.sock (unloaded)",
    ]

    assert service.run("unload") == 0
    expect(chosen).to_have_text("other.sock (unloaded)")
    expect_nothing_of_it(page)
    expect(page.locator("#model")).to_have_text(models[0].name)
    assert service.run("load", "--model", str(models[1])) == 0
    expect(chosen).to_have_text("other.sock")
    expect(note).to_be_hidden()
    expect(page.locator(".tier h3")).to_contain_text("device: 128 blocks of 16 tokens")
    expect(page.locator("#model")).to_have_text(models[1].name)


def test_a_lost_worker_stays_chosen_until_it_is_back(page: Page, service: TwoWorkers):
    first, _ = service.targets
    note, chosen = page.locator("#map-note"), page.locator("#worker option:checked")
    choose(page, first)
    service.worker.kill()
    expect(chosen).to_have_text("worker.sock (not attached)")
    expect(note).to_contain_text("no connection")
    expect_nothing_of_it(page)
    service.start_first_again()
    expect(chosen).to_have_text("worker.sock")
    expect(note).to_be_hidden()
    eventually(lambda: page.locator(".tier").count() or None, "its blocks are shown")
