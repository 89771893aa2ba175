"""The deployment that all tests share, and running streams."""

from collections.abc import Iterator

import pytest

from tests.compose.deployment import Deployment
from tests.compose.engine import why_no_engine


@pytest.fixture(scope="session")
def built() -> Iterator[Deployment]:
    """Builds all images, and removes them at the end."""
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
    """The deployment, up and healthy again for each test."""
    built.up()
    return built
