"""Tiny models, made once for all tests of this folder."""

import pytest

from tests.models_fixture import ModelDirs


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory):
    return ModelDirs(tmp_path_factory.mktemp("models"))
