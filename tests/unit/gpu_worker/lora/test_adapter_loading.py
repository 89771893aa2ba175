"""Which adapters are loaded, and which are refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker.lora import adapter_files
from gpu_worker.lora.adapter_files import load_adapter
from gpu_worker.models.registry import open_model
from gpu_worker.weights.json_fields import ModelError
from tests.lora_fixture import make_adapter
from tests.models_fixture import ModelDirs

Q_A = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory):
    return ModelDirs(tmp_path_factory.mktemp("models"))


@pytest.fixture
def adapter(model_dirs, tmp_path):
    return make_adapter(tmp_path / "adapter", model_dirs.get("llama"), seed=1)


def load(model_dirs, *named, family="llama", model_class=""):
    config = open_model(model_dirs.get(family), model_class).config
    device = torch.device("cpu")
    return [load_adapter(*each, config, torch.float32, device) for each in named]


def edit_config(adapter, **changes):
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(adapter, change):
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def assert_refused(model_dirs, adapter, *parts, **options):
    with pytest.raises(ModelError) as caught:
        load(model_dirs, ("a", adapter), **options)
    for part in parts:
        assert part in str(caught.value)


def test_adapters_come_by_name_with_digests_of_their_contents(model_dirs, adapter, tmp_path):
    other = make_adapter(tmp_path / "other", model_dirs.get("llama"), seed=2)
    a, b = load(model_dirs, ("a", other), ("b", adapter))
    assert (a.id.name, b.id.name) == ("a", "b")
    assert len(a.id.digest) == len(b.id.digest) == 32
    assert a.id.digest != b.id.digest
    assert load(model_dirs, ("c", adapter))[0].id.digest == b.id.digest
    edit_config(adapter, lora_alpha=9)
    assert load(model_dirs, ("c", adapter))[0].id.digest != b.id.digest


def test_only_the_targets_are_added_to(model_dirs, tmp_path):
    model = model_dirs.get("llama")
    path = make_adapter(tmp_path / "few", model, 1, targets=("v_proj", "down_proj"))
    (adapter,) = load(model_dirs, ("a", path))
    assert [set(layer) for layer in adapter.layers] == [{"qkv", "down"}] * 2
    added = adapter.layers[0]["qkv"](torch.ones(1, 64))
    assert not added[:, : 64 + 32].any()
    assert added[:, 64 + 32 :].all()


def test_an_expression_leaves_the_choice_to_the_tensors(model_dirs, adapter):
    edit_config(adapter, target_modules="all-linear")
    edit_tensors(adapter, lambda t: [t.pop(name) for name in list(t) if "layers.0" in name])
    (loaded,) = load(model_dirs, ("a", adapter))
    assert [len(layer) for layer in loaded.layers] == [0, 4]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "IA3"),
        ("task_type", "SEQ_CLS"),
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("bias", "lora_only"),
        ("lora_bias", True),
        ("rank_pattern", {"q_proj": 8}),
        ("alpha_pattern", {"q_proj": 8}),
        ("layers_to_transform", [0]),
        ("fan_in_fan_out", True),
        ("target_parameters", ["experts.down_proj"]),
        ("trainable_token_indices", [1]),
        ("init_lora_weights", "pissa"),
        ("a_variant_of_tomorrow", {"depth": 2}),
        ("target_modules", ["q_proj", "lm_head"]),
        ("target_modules", []),
        ("r", 0),
        ("lora_alpha", "many"),
    ],
)
def test_unsupported_options_are_refused_by_name(model_dirs, adapter, field, value):
    edit_config(adapter, **{field: value})
    assert_refused(model_dirs, adapter, "adapter_config.json", field)


def test_a_tensor_of_another_shape_is_refused(model_dirs, adapter):
    edit_tensors(adapter, lambda t: t.update({Q_A: torch.ones(4, 63)}))
    assert_refused(model_dirs, adapter, "adapter_model.safetensors", Q_A, "[4, 63]", "[4, 64]")


def test_another_rank_than_the_configs_is_refused(model_dirs, adapter):
    edit_config(adapter, r=8)
    assert_refused(model_dirs, adapter, "lora_A.weight has shape [4, ", "it must be [8, ")


def test_a_huge_rank_takes_no_memory(model_dirs, adapter):
    edit_config(adapter, r=10**12)
    assert_refused(model_dirs, adapter, "lora_A.weight has shape [4, ", "must be [1000000000000, ")


def test_a_missing_tensor_is_refused(model_dirs, adapter):
    edit_tensors(adapter, lambda t: t.pop(Q_A))
    assert_refused(model_dirs, adapter, "lacks", Q_A)


def test_a_tensor_of_another_module_is_refused(model_dirs, adapter):
    name = "base_model.model.lm_head.lora_A.weight"
    edit_tensors(adapter, lambda t: t.update({name: torch.ones(4, 64)}))
    assert_refused(model_dirs, adapter, name, "q_proj")


def test_an_adapter_of_a_deeper_model_is_refused(model_dirs, tmp_path):
    deeper = make_adapter(tmp_path / "deep", model_dirs.get("llama", num_hidden_layers=3), seed=1)
    assert_refused(model_dirs, deeper, "layers.2", "and 9 more")


def test_a_tensor_of_integers_is_refused(model_dirs, adapter):
    edit_tensors(adapter, lambda t: t.update({Q_A: torch.ones(4, 64, dtype=torch.int8)}))
    assert_refused(model_dirs, adapter, Q_A, "int8")


def test_a_pickle_is_refused(model_dirs, adapter):
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    assert_refused(model_dirs, adapter, "adapter_model.bin is a pickle")


def test_a_directory_without_an_adapter_is_refused(model_dirs, tmp_path):
    assert_refused(model_dirs, tmp_path, "adapter_config.json cannot be read")


@pytest.mark.parametrize("part", ["config", "tensors"])
def test_files_that_change_while_they_are_read_are_refused(
    model_dirs, adapter, monkeypatch, tmp_path, part
):
    other = make_adapter(tmp_path / "other", model_dirs.get("llama"), seed=2)
    read = adapter_files.read_adapter_config
    modules = adapter_files._adapted_modules

    def change_config(directory):
        config = read(directory)
        edit_config(adapter, lora_alpha=9)
        return config

    def change_tensors(*args):
        found = modules(*args)
        name = "adapter_model.safetensors"
        (other / name).replace(adapter / name)
        return found

    if part == "config":
        monkeypatch.setattr(adapter_files, "read_adapter_config", change_config)
    else:
        monkeypatch.setattr(adapter_files, "_adapted_modules", change_tensors)
    assert_refused(model_dirs, adapter, f"{adapter} has changed while it was read")


def test_experts_are_not_added_to(model_dirs, tmp_path):
    model = model_dirs.get("mixtral")
    attention = make_adapter(tmp_path / "attention", model, 1, targets=("q_proj", "o_proj"))
    (loaded,) = load(model_dirs, ("a", attention), family="mixtral")
    assert [set(layer) for layer in loaded.layers] == [{"qkv", "attention_output"}] * 2
    edit_config(attention, target_modules=["w1"])
    assert_refused(model_dirs, attention, "target_modules has 'w1'", family="mixtral")


def test_layers_without_experts_are_added_to(model_dirs, tmp_path):
    model = model_dirs.get("glm4_moe")  # whose first layer has none
    adapter = make_adapter(tmp_path / "a", model, 1, targets=("q_proj", "down_proj"))
    assert_refused(model_dirs, adapter, "mlp.experts.0.down_proj.lora_A", family="glm4_moe")

    def drop_experts(tensors):
        for name in [name for name in tensors if "experts" in name]:
            del tensors[name]

    edit_tensors(adapter, drop_experts)
    (loaded,) = load(model_dirs, ("a", adapter), family="glm4_moe")
    assert [set(layer) for layer in loaded.layers] == [{"qkv", "down"}, {"qkv"}]


@pytest.mark.parametrize(
    ("family", "model_class"), [("deepseek_v2", ""), ("llama", "transformers")]
)
def test_other_implementations_take_none(model_dirs, adapter, family, model_class):
    options = {"family": family, "model_class": model_class}
    supported = "LlamaForCausalLM", "GptOssForCausalLM", "GPTNeoXForCausalLM"
    assert_refused(model_dirs, adapter, "LoRA", *supported, **options)


def test_another_familys_maps_are_refused(model_dirs, adapter):
    edit_tensors(adapter, dict.clear)
    known = "supported: query_key_value, dense, dense_h_to_4h, dense_4h_to_h"
    assert_refused(model_dirs, adapter, "target_modules has 'q_proj'", known, family="gpt_neox")
