"""Fixtures of the tests that start real processes; all have the marker `e2e`."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.service import Service
from tests.e2e.trace_collector import TraceCollector
from tests.models_fixture import ModelDirs

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session", autouse=True)
def _no_proxy() -> Iterator[None]:
    """Disables proxies, because all servers are on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setenv("no_proxy", "127.0.0.1")
        yield


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> ModelDirs:
    return ModelDirs(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Makes directories for services, with names short enough for sockets."""
    root = tmp_path_factory.mktemp("q")
    numbers = itertools.count()
    return lambda: root / str(next(numbers))


@pytest.fixture(scope="session")
def long_llama(model_dirs: ModelDirs) -> Path:
    """A model whose context is long enough for streams that take seconds."""
    return model_dirs.get("llama", max_position_embeddings=4096)


@pytest.fixture(scope="session")
def slow_llama(model_dirs: ModelDirs) -> Path:
    """A model for which a prompt takes much longer to compute than to copy."""
    sizes = {"hidden_size": 384, "intermediate_size": 768, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 1}
    return model_dirs.get("llama", max_position_embeddings=4096, **sizes, **heads)


@pytest.fixture(scope="session")
def service(long_llama: Path, run_dir: Callable[[], Path]) -> Iterator[Service]:
    """The service shared by tests that do not break, stop or configure it."""
    with Service(run_dir(), long_llama, worker=["--num-blocks=1024"]) as service:
        yield service


@pytest.fixture(scope="module")
def collector() -> Iterator[TraceCollector]:
    with TraceCollector() as collector:
        yield collector


@pytest.fixture(scope="module")
def traced(
    collector: TraceCollector, long_llama: Path, run_dir: Callable[[], Path]
) -> Iterator[Service]:
    """A service that exports its spans, soon after they end."""
    endpoint = f"--otlp-traces-endpoint={collector.endpoint}"
    with Service(
        run_dir(),
        long_llama,
        worker=["--num-blocks=256", "--served-model-name=tiny", endpoint],
        scheduler=[endpoint],
        router=["--served-model-name=tiny", endpoint],
        env={"OTEL_BSP_SCHEDULE_DELAY": "100"},
    ) as service:
        yield service
