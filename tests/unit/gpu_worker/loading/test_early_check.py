"""A model that cannot be served is refused before its weights are fetched."""

import pytest

from gpu_worker.loading.early_check import check_config
from gpu_worker.settings import WorkerSettings
from gpu_worker.weights.json_fields import ModelError
from tests.models_fixture import make_model


def test_a_model_with_too_short_a_context_is_refused_without_its_weights(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    make_model(tmp_path / "model", "llama")
    memory = fsspec.filesystem("memory")
    memory.put(f"{tmp_path}/model/", "/early-check/", recursive=True)
    url, cache = "memory://early-check", tmp_path / "cache"
    statuses = []
    settings = WorkerSettings(model=url, cache_dir=cache, max_model_len=10**6)
    with pytest.raises(ModelError, match="max-model-len is 1000000"):
        check_config(settings, lambda status, _: statuses.append(status))
    assert not list(cache.rglob("*.safetensors"))
    assert set(statuses) == {f"downloading {url}"}
