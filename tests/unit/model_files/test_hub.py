"""Models by their names on a hub, which is a local server here, and by URLs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import COMMIT, HubServer, serving

from model_files.buckets import download_from_bucket
from model_files.errors import ModelError
from model_files.locate import find_model
from tests.gguf_fixture import SIZES, write_gguf
from tests.models_fixture import make_model

_CHILD = """
import json, sys
from pathlib import Path
from model_files.errors import ModelError
from model_files.locate import find_model

told = []
try:
    found = find_model(
        sys.argv[1], Path(sys.argv[2]), lambda *told_: told.append(told_),
        with_weights=json.loads(sys.argv[3]),
    )
    print(json.dumps([str(found), told]))
except ModelError as error:
    print(json.dumps([f"error: {error}", told]))
"""
"""In a process of its own: the hub's package reads the environment when it is imported."""

WEIGHTS = b"weights" * 100_000
TINY = {
    "config.json": b"{}",
    "tokenizer.json": b'{"a": 1}',
    "chat_template.jinja": b"hi",
    "model-00001-of-00002.safetensors": WEIGHTS,
    "model-00002-of-00002.safetensors": WEIGHTS + b"!",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"again",
    "README.md": b"readme",
    "onnx/config.json": b"{}",
}
SMALL = {"config.json", "tokenizer.json", "chat_template.jinja"}
SHARDS = {name for name in TINY if name.startswith("model-")}


@pytest.fixture
def hub():
    with serving(HubServer({"org/tiny": TINY, "org/old": {"config.json": b"{}"}})) as server:
        server.repositories["org/old"]["pytorch_model.bin"] = b"pickle"
        server.repositories["org/empty"] = {"README.md": b"readme"}
        yield server


@pytest.fixture
def find(hub, tmp_path):
    """Calls `find_model`; returns the path, or the error, and what was reported."""

    def run(model, *, with_weights=True, **environment):
        arguments = [model, str(tmp_path / "cache"), json.dumps(with_weights)]
        settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": ""}
        done = subprocess.run(
            [sys.executable, "-c", _CHILD, *arguments],
            env={**os.environ, **settings, **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(done.stdout)

    return run


def names_in(directory):
    return {path.name for path in Path(directory).iterdir() if not path.name.startswith(".")}


def test_only_needed_files_are_downloaded_and_once(hub, find):
    directory, _ = find("org/tiny@v1", with_weights=False)
    assert names_in(directory) == SMALL == set(hub.downloaded)
    again, told = find("org/tiny")
    assert again == directory
    assert again.endswith(COMMIT)
    assert names_in(directory) == SMALL | SHARDS
    assert sorted(hub.downloaded) == sorted(SMALL | SHARDS)
    statuses = [status for status, _ in told]
    shares = [share for _, share in told if share is not None]
    assert statuses[0] == "looking up org/tiny"
    assert statuses[-1] == "downloading org/tiny"
    assert shares[-1] == 1.0
    assert (find("org/tiny", HF_HUB_OFFLINE="1"))[0] == directory


def test_a_token_is_sent(hub, find):
    hub.token = "secret"
    assert "or it needs a token that may read it (HF_TOKEN)" in find("org/tiny")[0]
    assert find("org/tiny", HF_TOKEN="secret")[0].endswith(COMMIT)


def test_pickles_are_taken_where_there_is_nothing_else(find):
    directory, _ = find("org/old")
    assert names_in(directory) == {"config.json", "pytorch_model.bin"}


def test_a_gguf_file_of_a_repository(hub, find, tmp_path):
    llama = make_model(tmp_path / "llama", "llama", **SIZES)
    content = write_gguf(llama, tmp_path / "tiny.gguf", "Q4_0").read_bytes()
    hub.repositories["org/files"] = {"q/tiny-Q4_0.gguf": content, "q/tiny-Q8_0.gguf": b"no"}
    directory, _ = find("org/files/q/tiny-Q4_0.gguf")
    assert names_in(directory) >= {"config.json", "tokenizer.json", "model-00000.gguf"}
    assert hub.downloaded == ["tiny-Q4_0.gguf"]
    assert "org/files has no such file" in find("org/files/q/tiny-Q2_K.gguf")[0]


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("org/none", "the hub has no org/none, or it needs a token that may read it (HF_TOKEN)"),
        ("org/tiny@v9", "org/tiny has no revision 'v9'"),
        ("org/empty", "org/empty has no config.json. If it has GGUF files, name one: org/empty/"),
    ],
)
def test_what_the_hub_lacks_is_said(find, model, problem):
    error, _ = find(model)
    assert error.startswith(f"error: model is '{model}'; ")
    assert problem in error


def test_without_a_network_the_error_says_what_to_do(find):
    error, _ = find("org/tiny", HF_ENDPOINT="http://127.0.0.1:9")
    assert "model is 'org/tiny'; there is no such directory, the hub cannot be reached" in error
    assert "`hf download org/tiny`" in error
    error, _ = find("org/tiny", HF_HUB_OFFLINE="1")
    assert "the hub cannot be reached, and its cache lacks the model" in error


# --- URLs -------------------------------------------------------------------------------------


@pytest.fixture
def bucket():
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    for name, content in TINY.items():
        memory.pipe(f"/bucket/tiny/{name}", content)
    yield memory
    memory.rm("/bucket", recursive=True)


@pytest.mark.usefixtures("bucket")
def test_a_directory_at_a_url_is_copied_once(tmp_path):
    told: list[tuple[str, float | None]] = []

    def find(**more):
        return find_model("memory://bucket/tiny", tmp_path, lambda *args: told.append(args), **more)

    directory = find(with_weights=False)
    assert names_in(directory) == SMALL
    assert find() == directory
    assert names_in(directory) == SMALL | SHARDS | {"consolidated.safetensors"}
    assert (directory / "model-00001-of-00002.safetensors").read_bytes() == WEIGHTS
    assert told[-1] == ("downloading memory://bucket/tiny", 1.0)
    told.clear()
    find()
    assert told == []


@pytest.mark.parametrize("url", ["memory://bucket/tiny", "memory://bucket/tiny/model.gguf"])
def test_a_file_that_has_changed_is_copied_again_though_its_size_has_not(bucket, tmp_path, url):
    def read():
        path = download_from_bucket(url, tmp_path, lambda *_: None, with_weights=True)
        return (path if path.is_file() else path / "model.gguf").read_bytes()

    bucket.pipe("/bucket/tiny/model.gguf", b"old")
    assert read() == b"old"
    bucket.pipe("/bucket/tiny/model.gguf", b"new")
    assert read() == b"new"


@pytest.mark.usefixtures("bucket")
def test_other_users_may_read_a_shared_cache_if_the_umask_says_so(tmp_path):
    before = os.umask(0o022)
    try:
        directory = find_model("memory://bucket/tiny", tmp_path)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in directory.glob("*.*")} == {0o644}


@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("memory://bucket/none", "cannot be downloaded"),
        ("nowhere://bucket/x", "Protocol not known"),
        ("gs://bucket/x", "a package is missing: .* gcsfs for gs://"),
    ],
)
def test_urls_that_cannot_be_read_are_refused(tmp_path, url, problem):
    if url.startswith("gs") and _has("gcsfs"):
        pytest.skip("gcsfs is installed")
    with pytest.raises(ModelError, match=f"model is '{url}'.*{problem}"):
        find_model(url, tmp_path)


def _has(package):
    try:
        __import__(package)
    except ImportError:
        return False
    return True


def test_a_model_of_sentence_transformers_comes_with_its_pooling(hub, find):
    files = {"modules.json": b"[]", "1_Pooling/config.json": b"{}", "2_Dense/config.json": b"{}"}
    hub.repositories["org/vectors"] = TINY | files
    found, _ = find("org/vectors")
    assert names_in(found) == SMALL | SHARDS | {"modules.json", "1_Pooling"}
    assert (Path(found) / "1_Pooling" / "config.json").read_bytes() == b"{}"


def test_an_older_tokenizer_is_downloaded_if_there_is_no_other(hub, find, bucket, tmp_path):
    old = {"tokenizer.model": b"\n.", "merges.txt": b"m", "vocab.txt": b"v"}
    without = {name: content for name, content in TINY.items() if name != "tokenizer.json"}
    hub.repositories["org/tiny"] = TINY | old
    find("org/tiny")
    assert not {*old, "vocab.txt"} & set(hub.downloaded)
    hub.repositories["org/older"] = without | old
    find("org/older", with_weights=False)
    assert set(old) <= set(hub.downloaded)
    for name, content in old.items():
        bucket.pipe(f"/bucket/tiny/{name}", content)
    for with_other in True, False:
        if not with_other:
            bucket.rm("/bucket/tiny/tokenizer.json")
        cache = tmp_path / str(with_other)
        url = "memory://bucket/tiny"
        found = download_from_bucket(url, cache, lambda *_: None, with_weights=False)
        assert (set(old) <= names_in(found)) == (not with_other)


@pytest.mark.parametrize("end", ["", "/"])
def test_so_does_one_at_a_url(bucket, tmp_path, end):
    bucket.pipe("/bucket/tiny/modules.json", b"[]")
    bucket.pipe("/bucket/tiny/2_Dense/config.json", b"{}")
    assert "1_Pooling" not in names_in(find_model(f"memory://bucket/tiny{end}", tmp_path))
    bucket.pipe("/bucket/tiny/1_Pooling/config.json", b"{}")
    found = find_model(f"memory://bucket/tiny{end}", tmp_path)
    assert (found / "1_Pooling" / "config.json").read_bytes() == b"{}"
    assert "2_Dense" not in names_in(found)
