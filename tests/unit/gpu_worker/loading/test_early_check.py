"""A model that cannot be served is refused before its weights are fetched."""

import json

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


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            {"architectures": ["GPTNeoXForCausalLM"], "hidden_size": 64},
            "num_attention_heads is missing",
        ),
        (
            {"architectures": ["BertModel"], "hidden_size": 64, "num_attention_heads": 3},
            "num_attention_heads must divide hidden_size, 64",
        ),
        (
            {
                "architectures": ["FalconForCausalLM"],
                "quantization_config": {"quant_method": "hqq"},
            },
            "quant_method is 'hqq'; of models that transformers runs, supported: fp8, mxfp4",
        ),
        (
            {
                "architectures": ["FalconForCausalLM"],
                "quantization_config": {"quant_method": "mxfp4"},
            },
            "quantization_config.quant_method is 'mxfp4', which is supported only for Gpt",
        ),
    ],
    ids=str,
)
def test_what_config_json_rules_out_is_refused_early(tmp_path, config, problem):
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.model").write_text("not converted before config.json is checked")
    with pytest.raises(ModelError, match=problem):
        check_config(WorkerSettings(model=str(tmp_path)), lambda *_: None)


def test_quantization_that_ours_has_is_refused_early_if_transformers_must_run_it(
    model_dirs, tmp_path
):
    config = json.loads((model_dirs.get("llama") / "config.json").read_text())
    config |= {"clip_qkv": 8.0, "quantization_config": {"quant_method": "awq"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="quant_method is 'awq'; of models that transformers runs"):
        check_config(WorkerSettings(model=str(tmp_path)), lambda *_: None)


@pytest.mark.parametrize(
    ("method", "problem"),
    [
        ("hqq", "quant_method is 'hqq'; supported: awq, gptq"),
        (
            "mxfp4",
            "is 'mxfp4', which is supported only for GptOssForCausalLM",
        ),
    ],
)
def test_quantization_that_ours_lacks_is_refused_early(model_dirs, tmp_path, method, problem):
    config = json.loads((model_dirs.get("llama") / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=problem):
        check_config(WorkerSettings(model=str(tmp_path)), lambda *_: None)
