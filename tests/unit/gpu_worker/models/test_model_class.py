"""Models that run on a user's class."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpu_worker.models.registry import open_model
from gpu_worker.weights.json_fields import ModelError
from gpu_worker.weights.quantized_linear import Quantization
from tests.unit.gpu_worker.models.against_transformers import (
    NUM_TOKENS,
    assert_equals_transformers,
)
from tests.unit.gpu_worker.models.paged_loop import CPU, PagedLoop, Sequence, random_prompt

DOCS = Path(__file__).parents[4] / "docs/models.md"
PATH = "my_models.gpt2:Gpt2"


def write_example(directory):
    """Write the package of docs/models.md; return its import directory."""
    [example] = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    package = directory / "my_models"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "gpt2.py").write_text(example)
    return directory


@pytest.fixture
def example(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(write_example(tmp_path))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "my_models"]:
        del sys.modules[name]


@pytest.mark.usefixtures("example")
def test_the_documented_example_is_gpt2(model_dirs):
    directory = model_dirs.get("gpt2", tie_word_embeddings=True)
    source = open_model(directory, PATH)
    model = source.load(torch.float32, CPU, lambda _: None)
    assert type(model).__module__ == "my_models.gpt2"
    sequences = [
        Sequence(random_prompt(length, seed=length), start_step=3 * i)
        for i, length in enumerate((41, 2, 30))
    ]
    PagedLoop(model, block_size=8, config=source.config).generate(
        sequences, NUM_TOKENS, chunk_len=11
    )
    for sequence in sequences:
        assert_equals_transformers(directory, sequence)


@pytest.mark.usefixtures("example")
def test_its_checkpoint_is_checked_like_any_other(model_dirs):
    with pytest.raises(ModelError, match=r"config\.json: n_head is missing"):
        open_model(model_dirs.get("llama"), PATH)
    source = open_model(model_dirs.get("gpt2"), PATH)
    with pytest.raises(ModelError, match=r"has lm_head\.weight, unknown to GPT2LMHeadModel"):
        source.load(torch.float32, CPU, lambda _: None)


@pytest.mark.usefixtures("example")
def test_it_may_read_mxfp4(model_dirs, tmp_path):
    config = json.loads((model_dirs.get("gpt2") / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert open_model(tmp_path, PATH).config.architecture == "GPT2LMHeadModel"
    with pytest.raises(ModelError, match="'mxfp4', which is supported only for GptOssForCausalLM"):
        open_model(tmp_path)


@pytest.mark.usefixtures("example")
def test_one_that_makes_its_maps_by_itself_cannot_be_quantized(model_dirs):
    directory = model_dirs.get("gpt2", tie_word_embeddings=True)
    source = open_model(directory, PATH, Quantization.INT8)
    message = (
        "quantization is int8; GPT2LMHeadModel makes no map with Weights.linear or Weights.head"
    )
    with pytest.raises(ModelError, match=message):
        source.load(torch.float32, CPU, lambda _: None)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("no_such_package:Model", "it cannot be imported: No module named 'no_such_package'"),
        ("json:NoSuchClass", "it cannot be imported: module 'json' has no attribute 'NoSuchClass'"),
        ("json", "it cannot be imported: "),
        ("json:JSONDecoder", "it has no read_config, forward, logits"),
        ("json:dumps", "it has no read_config, forward, logits"),
    ],
)
def test_a_path_that_leads_to_no_model_is_named(model_dirs, path, problem):
    with pytest.raises(ModelError) as caught:
        open_model(model_dirs.get("llama"), path)
    assert str(caught.value).startswith(f"model-class is {path!r}")
    assert problem in str(caught.value)


def test_native_families_need_no_transformers(model_dirs):
    program = (
        "import sys; sys.modules['transformers'] = None\n"
        "import pathlib; from gpu_worker.weights.json_fields import ModelError\n"
        "from gpu_worker.models.registry import open_model\n"
        "open_model(pathlib.Path(sys.argv[1]))\n"
        "try: open_model(pathlib.Path(sys.argv[2]))\n"
        "except ModelError as error: print(error)\n"
    )
    directories = map(str, (model_dirs.get("llama"), model_dirs.get("gpt2")))
    done = subprocess.run(
        [sys.executable, "-c", program, *directories], capture_output=True, text=True, check=True
    )
    assert "architectures names GPT2LMHeadModel; without the package transformers" in done.stdout
    assert "pip install 'quire[transformers]'" in done.stdout
