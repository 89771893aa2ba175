"""Reading checkpoints: what is accepted, and how damage is reported."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker.models.registry import open_model
from gpu_worker.weights.json_fields import ModelError
from tests.unit.gpu_worker.models.paged_loop import CPU, PagedLoop, Sequence, load

INDEX = "model.safetensors.index.json"


@pytest.fixture
def directory(model_dirs, tmp_path):
    """A Llama in one file, to be damaged."""
    return shutil.copytree(model_dirs.get("llama"), tmp_path / "model")


@pytest.fixture
def sharded(model_dirs, tmp_path):
    """The same Llama in several files, to be damaged."""
    return shutil.copytree(model_dirs.get("llama", max_shard_size="50KB"), tmp_path / "model")


def change(directory, function):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    function(tensors)
    save_file(tensors, path)


def logits(directory):
    sequence = Sequence([3, 1, 4, 1, 5])
    PagedLoop(load(directory), block_size=8).generate([sequence], 1)
    return torch.stack(sequence.logits)


def test_shards_hold_what_one_file_holds(directory, model_dirs):
    sharded = model_dirs.get("llama", max_shard_size="50KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 1
    assert torch.equal(logits(sharded), logits(directory))


def test_progress_grows_to_one(directory):
    seen = []
    open_model(directory).load(torch.float32, CPU, seen.append)
    assert seen == sorted(seen)
    assert 0 < seen[0] < seen[-1] == 1.0


def test_a_checkpoint_is_converted_to_the_dtype_asked_for(directory):
    model = load(directory, torch.bfloat16)
    assert model.embedding.dtype == model.layers[0].input_norm.dtype == torch.bfloat16
    assert model.cos_sin.dtype == torch.float32


def test_the_model_does_not_depend_on_its_files_after_loading(directory):
    expected = logits(directory)
    model = load(directory)
    path = directory / "model.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    sequence = Sequence([3, 1, 4, 1, 5])
    PagedLoop(model, block_size=8).generate([sequence], 1)
    assert torch.equal(torch.stack(sequence.logits), expected)


def test_rotary_frequencies_in_old_checkpoints_are_ignored(directory):
    expected = logits(directory)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(directory, lambda tensors: tensors.update({name: torch.zeros(8)}))
    assert torch.equal(logits(directory), expected)


def test_a_tied_head_stored_again_is_ignored(model_dirs, tmp_path):
    tied = model_dirs.get("llama", tie_word_embeddings=True)
    directory = shutil.copytree(tied, tmp_path / "model")
    change(directory, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(500, 64)}))
    assert torch.equal(logits(directory), logits(tied))


def test_missing_tensors_are_named(directory):
    def drop(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"], tensors["lm_head.weight"]

    change(directory, drop)
    names = r"lm_head\.weight, model\.layers\.1\.mlp\.up_proj\.weight"
    with pytest.raises(ModelError, match=rf"lacks {names} of LlamaForCausalLM"):
        load(directory)


def test_unexpected_tensors_are_named_a_few_of_many(directory):
    extra = {f"model.layers.{i}.mlp.gate_proj.bias": torch.zeros(112) for i in range(7)}
    change(directory, lambda tensors: tensors.update(extra))
    names = r"has model\.layers\.0\.mlp\.gate_proj\.bias, .* and 2 more, unknown to LlamaForCausal"
    with pytest.raises(ModelError, match=names):
        load(directory)


def test_a_misshapen_tensor_is_named(directory):
    change(directory, lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}))
    message = r"model\.norm\.weight has shape \[63\]; by config\.json it must be \[64\]"
    with pytest.raises(ModelError, match=message):
        load(directory)


def test_tensors_in_pickles_are_read(directory):
    expected = load(directory)
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    torch.save(tensors, directory / "pytorch_model.bin")
    assert torch.equal(load(directory).embedding, expected.embedding)
    half = len(tensors) // 2
    shards = {"a.bin": list(tensors)[:half], "b.bin": list(tensors)[half:]}
    (directory / "pytorch_model.bin").unlink()
    for shard, names in shards.items():
        torch.save({name: tensors[name] for name in names}, directory / shard)
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    index = directory / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(load(directory).embedding, expected.embedding)


def test_pickles_from_before_zip_files_are_read_and_a_damaged_one_is_named(directory):
    expected = load(directory)
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    path = directory / "pytorch_model.bin"
    torch.save(tensors, path, _use_new_zipfile_serialization=False)
    assert torch.equal(load(directory).embedding, expected.embedding)
    whole = path.read_bytes()
    for damaged in (whole[:-30], whole[:300], b"", b"\x80\x02}q\x00.", b"<html>"):
        path.write_bytes(damaged)
        with pytest.raises(ModelError, match=r"pytorch_model.bin cannot be read as tensors of tor"):
            load(directory)


class _RunsCode:
    def __reduce__(self):
        return print, ("code of a pickle ran",)


def test_code_in_pickles_is_not_run(directory, capsys):
    (directory / "model.safetensors").unlink()
    path = directory / "pytorch_model.bin"
    torch.save({"model.norm.weight": _RunsCode()}, path)
    with pytest.raises(ModelError, match=r"pytorch_model.bin cannot be read as tensors of torch"):
        load(directory)
    assert capsys.readouterr().out == ""
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ModelError, match=r"pytorch_model.bin cannot be read as tensors of torch"):
        load(directory)


def test_a_directory_without_weights(directory):
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"holds neither model\.safetensors nor model\.safetens"):
        load(directory)


@pytest.mark.parametrize("model_class", ["", "transformers"])
def test_nan_is_refused_and_infinity_is_not(directory, model_class):
    name = "model.layers.1.mlp.up_proj.weight"

    def load_it():
        return open_model(directory, model_class).load(torch.float32, CPU, lambda _: None)

    infinities = torch.zeros(112, 64).index_fill(1, torch.tensor([0]), torch.inf)
    infinities[:, 1] = -torch.inf
    change(directory, lambda tensors: tensors.update({name: infinities}))
    load_it()
    infinities[5, 7] = torch.nan
    change(directory, lambda tensors: tensors.update({name: infinities}))
    with pytest.raises(ModelError, match=rf"{name} has NaN"):
        load_it()


def test_a_truncated_file(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read as safetensors"):
        load(directory)


def test_a_missing_shard(sharded):
    shard = min(sharded.glob("model-*.safetensors"))
    shard.unlink()
    with pytest.raises(ModelError, match=rf"{shard.name} cannot be read as safetensors"):
        load(sharded)


@pytest.mark.parametrize("name", ["../model.safetensors", "sub/model.safetensors", 5])
def test_an_index_that_names_no_file_of_its_directory(sharded, name):
    index = {"weight_map": {"lm_head.weight": name}}
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"weight_map\.lm_head\.weight is .*; it must be the name"):
        load(sharded)


def test_dummy_weights_need_no_files_and_are_the_same_each_time(directory):
    expected = load(directory)
    (directory / "model.safetensors").unlink()
    models = [
        open_model(directory, is_dummy=True).load(torch.float32, CPU, lambda _: None)
        for _ in range(2)
    ]
    for model in models:
        assert model.embedding.shape == expected.embedding.shape
        assert model.layers[0].input_norm.eq(1).all()
    outputs = []
    for model in models:
        sequence = Sequence([3, 1, 4])
        PagedLoop(model, block_size=8).generate([sequence], 4)
        assert torch.stack(sequence.logits).isfinite().all()
        outputs.append(sequence.output)
    assert outputs[0] == outputs[1]


def test_dummy_weights_of_a_model_of_transformers_are_refused(model_dirs):
    with pytest.raises(ModelError, match="load-format is dummy"):
        open_model(model_dirs.get("llama"), "transformers", is_dummy=True)
