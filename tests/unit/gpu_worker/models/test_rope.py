"""The rotary embedding of a config.json equals that of transformers."""

import json

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gpu_worker.models.llama.config import read_llama_config
from gpu_worker.models.registry import open_model
from gpu_worker.models.rope_table import rotary_table
from gpu_worker.weights.json_fields import UnsupportedError, read_json

FIELDS = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_theta": 1e4,
}
ARCHITECTURES = {
    "gpt_neox": "GPTNeoXForCausalLM",
    "llama": "LlamaForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
SCALINGS = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"short_factor": [1.0 + 0.3 * i for i in range(8)], "long_factor": [9.0] * 8},
    "yarn": {"factor": 8.0},
}
NUM_POSITIONS = 64


def write(directory, model_type, original_len, **fields):
    """Write a config.json with this original length outside of the dictionary, if any."""
    fields |= {"model_type": model_type, "architectures": [ARCHITECTURES[model_type]]}
    if original_len is not None:
        fields["original_max_position_embeddings"] = original_len
    (directory / "config.json").write_text(json.dumps(FIELDS | fields))
    return directory


def scaling(rope_type, original_len):
    inside = {} if original_len is None else {"original_max_position_embeddings": original_len}
    return {"rope_type": rope_type, **SCALINGS[rope_type], **inside}


def assert_equals_transformers(directory, max_model_len=None, layer_type=None):
    """Compare the tables, and return our config."""
    ours = open_model(directory, max_model_len=max_model_len).config
    theirs = AutoConfig.from_pretrained(directory)
    rope = theirs.rope_parameters if layer_type is None else theirs.rope_parameters[layer_type]
    frequencies, strength = ROPE_INIT_FUNCTIONS[rope["rope_type"]](
        theirs, torch.device("cpu"), seq_len=max_model_len, layer_type=layer_type
    )
    angles = torch.outer(torch.arange(NUM_POSITIONS), frequencies)
    expected = torch.cat((angles.cos(), angles.sin()), dim=-1) * strength
    table = rotary_table(ours.rope, ours.rotary_dim, NUM_POSITIONS)
    torch.testing.assert_close(table, expected, rtol=0, atol=1e-5)
    return ours


@pytest.mark.parametrize("inside", [None, 64])
@pytest.mark.parametrize("outside", [None, 32])
@pytest.mark.parametrize("rope_type", SCALINGS)
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_an_original_length_outside_of_the_dictionary_wins(
    tmp_path, field, rope_type, outside, inside
):
    write(tmp_path, "llama", outside, **{field: scaling(rope_type, inside)})
    config = assert_equals_transformers(tmp_path)
    if rope_type == "longrope":
        assert config.max_model_len == (outside or inside or 512)


@pytest.mark.parametrize("inside", [None, 64])
@pytest.mark.parametrize(("outside", "longest"), [(None, 4096), (256, 256)])
def test_phi_3_has_an_original_length_of_its_own(tmp_path, outside, inside, longest):
    rope = scaling("longrope", inside)
    write(tmp_path, "phi3", outside, rope_scaling=rope, max_position_embeddings=8192)
    assert assert_equals_transformers(tmp_path).max_model_len == longest
    assert assert_equals_transformers(tmp_path, longest).max_model_len == longest
    assert assert_equals_transformers(tmp_path, longest + 1).max_model_len == 8192


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_phi_3_has_older_names_for_longrope(tmp_path, name):
    rope = scaling("longrope", 64) | {"rope_type": name}
    write(tmp_path, "phi3", 256, rope_scaling=rope)
    assert assert_equals_transformers(tmp_path).max_model_len == 256
    assert assert_equals_transformers(tmp_path, 257).max_model_len == 512


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_phi_3_with_an_older_name_may_have_its_length_only_outside(tmp_path, name):
    """transformers refuses such a config, so both are ours."""
    older = {**SCALINGS["longrope"], "type": name}
    for max_model_len, longest in ((None, 256), (256, 256), (257, 512)):
        write(tmp_path, "phi3", 256, rope_scaling=older)
        config = open_model(tmp_path, max_model_len=max_model_len).config
        assert config.max_model_len == longest
        write(tmp_path, "phi3", 256, rope_scaling=scaling("longrope", 256))
        assert config == assert_equals_transformers(tmp_path, max_model_len)


def test_other_families_do_the_same(tmp_path):
    write(tmp_path, "gpt_neox", 32, rope_scaling=scaling("yarn", 64), rotary_pct=0.5)
    assert_equals_transformers(tmp_path)


@pytest.mark.parametrize("is_old", [True, False])
def test_dictionaries_by_kind_of_layer_have_their_own_lengths(tmp_path, is_old):
    full = scaling("yarn", 64)
    by_kind = {"full_attention": full | {"rope_theta": 1e4}, "sliding_attention": {}}
    rope = {"rope_scaling": full} if is_old else {"rope_parameters": by_kind}
    write(tmp_path, "olmo3", 32, layer_types=["full_attention"], sliding_window=512, **rope)
    assert_equals_transformers(tmp_path, layer_type="full_attention")


@pytest.mark.parametrize(
    ("outside", "inside", "max_model_len", "longest"),
    [(64, 128, 100, 128), (128, 64, 65, 512), (64, None, 65, 512)],
)
def test_olmo_3_chooses_factors_by_the_length_inside(
    tmp_path, outside, inside, max_model_len, longest
):
    rope = scaling("longrope", inside)
    write(
        *(tmp_path, "olmo3", outside),
        layer_types=["full_attention"],
        sliding_window=512,
        rope_scaling=rope,
    )
    ours = assert_equals_transformers(tmp_path, max_model_len, layer_type="full_attention")
    assert ours.max_model_len == longest


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_transformers_runs_longrope_by_kind_of_layer(tmp_path, kind):
    by_kind = {"full_attention": {}, "sliding_attention": {}, kind: scaling("longrope", 64)}
    write(
        *(tmp_path, "olmo3", 32),
        layer_types=["full_attention", "sliding_attention"],
        num_hidden_layers=2,
        sliding_window=512,
        rope_parameters=by_kind,
    )
    with pytest.raises(UnsupportedError, match=f"rope_parameters.{kind} has LongRoPE"):
        read_llama_config(read_json(tmp_path / "config.json"))
    assert open_model(tmp_path).config.max_model_len == 64
    assert open_model(tmp_path, max_model_len=65).config.max_model_len == 512


@pytest.mark.parametrize("model_class", ["", "transformers"])
def test_a_null_outside_counts_as_absent(tmp_path, model_class):
    rope = scaling("longrope", 64)
    write(tmp_path, "llama", None, rope_scaling=rope, original_max_position_embeddings=None)
    assert open_model(tmp_path, model_class).config.max_model_len == 64
    assert open_model(tmp_path, model_class, max_model_len=65).config.max_model_len == 512


def test_a_model_that_transformers_runs_has_the_same_context(tmp_path):
    write(tmp_path, "llama", 64, rope_parameters=scaling("longrope", 32))
    assert open_model(tmp_path, "transformers").config.max_model_len == 64
    assert open_model(tmp_path, "transformers", max_model_len=65).config.max_model_len == 512
