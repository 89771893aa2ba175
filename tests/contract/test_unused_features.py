"""A service loads no module of a feature that it does not use."""

import re
from pathlib import Path

import pytest

from tests.e2e.generation import generate_request, read
from tests.e2e.service import Service

MODEL = Path(__file__).parents[2] / "models" / "quire-tiny-python"
EXTRAS = {"zmq", "nixl", "nixl_cu12", "nixl_cu13", "fsspec", "psycopg", "transformers"}
FEATURES = {
    "scheduler": {"scheduler_svc.kv_events", "scheduler_svc.lease"},
    "router": {"router.vllm_engine", "router.openengine", "quire.vllm_engine", "quire.openengine"},
    "worker": set(),
}
NEEDED = {"scheduler": "scheduler_svc.app", "router": "router.app", "worker": "torch"}


@pytest.mark.e2e
def test_a_service_without_features_loads_none_of_their_modules(tmp_path):
    with Service(tmp_path, MODEL, env={"PYTHONPROFILEIMPORTTIME": "1"}) as service:
        request = generate_request("def add(", max_tokens=4)
        assert read(service.stub.Generate(request)).outputs
        for name, features in FEATURES.items():
            log = getattr(service, name).log
            loaded = set(re.findall(r"^import time:.*\| +(\S+)$", log, re.MULTILINE))
            assert NEEDED[name] in loaded
            unused = EXTRAS | features
            assert not {each for each in loaded if unused & parents(each)}, name


def parents(module: str) -> set[str]:
    parts = module.split(".")
    return {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
