"""The deployment that all tests share, and streams that are under way."""

from collections.abc import Iterator

import pytest

from tests.compose.deployment import Deployment
from tests.compose.engine import why_no_engine


@pytest.fixture(scope="session")
def built() -> Iterator[Deployment]:
    """All images, and in the end nothing of them."""
    if (reason := why_no_engine()) is not None:
        pytest.skip(reason)
    deployment = Deployment()
    try:
        deployment.build()
        yield deployment
    finally:
        deployment.down()


@pytest.fixture
def deployment(built: Deployment) -> Deployment:
    """Up and healthy, whatever the test before it has done."""
    built.up()
    return built
