"""Two cells, the gateway in front of them, and its client."""

import os
import shutil
from pathlib import Path

import openai
import pytest

from tests.smg.gateway import MODEL, Cell, Gateway


@pytest.fixture(scope="session")
def cells(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cells")
    with Cell(directory / "0", MODEL) as first, Cell(directory / "1", MODEL) as second:
        yield first, second


@pytest.fixture(scope="session")
def program():
    found = shutil.which(os.environ.get("SMG", "smg"))
    if found is None:
        pytest.skip("the Shepherd Model Gateway (smg) is not installed: run make smg-test")
    return Path(found)


@pytest.fixture(scope="session")
def gateway(program, cells, tmp_path_factory):
    log = tmp_path_factory.mktemp("smg") / "smg.log"
    with Gateway(program, log, cells) as gateway:
        yield gateway


@pytest.fixture(scope="session")
def client(gateway):
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def direct(cells):
    """The first cell's own API; its port changes when its router starts again."""
    with openai.OpenAI(base_url=f"{cells[0].url}/v1", api_key="none", max_retries=0) as client:
        yield client
