"""gpt-oss with experts in MXFP4 equals transformers with the numbers that they stand for."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from gpu_worker.models.gpt_oss.config import read_gpt_oss_config
from gpu_worker.models.gpt_oss.decoder import build_gpt_oss
from gpu_worker.models.registry import open_model
from gpu_worker.ranks.shards import Place
from gpu_worker.weights import gpu_linear
from gpu_worker.weights.gpu_linear import QuantizedLinear
from gpu_worker.weights.json_fields import JsonFields, ModelError
from gpu_worker.weights.quantized_linear import Quantization
from gpu_worker.weights.reader import Weights
from gpu_worker.weights.stored.format import read_stored_format
from kernels.cpu import linear as native_linear
from kernels.cpu.library import native
from tests.lone_rank import LoneRank
from tests.mxfp4_fixture import write_mxfp4
from tests.unit.gpu_worker.models.against_transformers import (
    NUM_TOKENS,
    assert_equals_transformers,
)
from tests.unit.gpu_worker.models.paged_loop import CPU, PagedLoop, Sequence, load, random_prompt

YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def published(model_dirs, tmp_path_factory):
    """The packed model, and the plain one."""
    directory = model_dirs.get("gpt_oss", rope_parameters=YARN, num_hidden_layers=3)
    return write_mxfp4(directory, tmp_path_factory.mktemp("gpt_oss"))


def test_tokens_in_a_batch_with_chunks_equal_transformers(published):
    packed, plain = published
    sequences = [
        Sequence(random_prompt(length, seed=length), start_step=4 * i)
        for i, length in enumerate((41, 1, 70))
    ]
    model = load(packed)
    assert type(model).__name__ == "LlamaDecoder"
    PagedLoop(model, block_size=8).generate(sequences, NUM_TOKENS, chunk_len=13)
    for sequence in sequences:
        assert_equals_transformers(plain, sequence)
    distinct = {token for sequence in sequences for token in sequence.output}
    assert len(distinct) > NUM_TOKENS // 4, "a repetitive model would test little"


@pytest.mark.skipif(native() is None, reason="only native code gives the same bits in any batch")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sequence_has_the_same_bits_alone_in_company_and_in_any_chunks(published, dtype):
    model = load(published[0], dtype)
    prompts = [random_prompt(length, seed=length) for length in (70, 16, 5)]
    together = [Sequence(prompt) for prompt in prompts]
    PagedLoop(model, block_size=16).generate(together, 32, chunk_len=9)
    for prompt, sequence in zip(prompts, together, strict=True):
        again = Sequence(prompt + sequence.output[:20])
        PagedLoop(model, block_size=8).generate([again], 12, chunk_len=128)
        assert again.output == sequence.output[20:]
        assert torch.equal(torch.stack(again.logits), torch.stack(sequence.logits))


def test_bfloat16_has_the_experts_exactly(published):
    """So it is as with dequantized weights, up to the order of sums."""
    prompt = random_prompt(41, seed=2)
    logits = []
    for directory in published:
        sequence = Sequence(prompt)
        PagedLoop(load(directory, torch.bfloat16), block_size=16).generate([sequence], 1)
        logits.append(torch.stack(sequence.logits))
    of_packed, of_plain = logits
    assert (of_packed - of_plain).norm() < 0.01 * of_plain.norm()


@pytest.mark.skipif(native() is None, reason="the twin has no packed maps")
@pytest.mark.parametrize("is_dummy", [False, True], ids=["read", "drawn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_take_the_bytes_of_the_file(published, dtype, is_dummy):
    packed, _ = published
    tensors = load_file(packed / "model.safetensors")
    in_file = sum(t.nbytes for name, t in tensors.items() if name.endswith(("_blocks", "_scales")))
    held = 0
    model = open_model(packed, is_dummy=is_dummy).load(dtype, CPU, lambda _: None)
    for layer in model.layers:
        for expert in layer.feed_forward.experts:
            for linear in (expert.gate_up, expert.down):
                held += linear.panels.nbytes + linear._scales.nbytes
    assert held == in_file


def test_ranks_draw_the_same_routers_and_norms_and_experts_differ(model_dirs):
    directory = model_dirs.get("gpt_oss", num_hidden_layers=3)
    places = [Place(rank, tensor_size=2) for rank in range(2)]
    first, second = (
        open_model(directory, place=place, is_dummy=True).load(
            torch.float32, CPU, lambda _: None, LoneRank(place)
        )
        for place in places
    )
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(first.embedding, second.embedding)
    for ours, theirs in zip(first.layers, second.layers, strict=True):
        assert torch.equal(ours.input_norm, theirs.input_norm)
        assert torch.equal(ours.mlp_norm, theirs.mlp_norm)
        for of_ours, of_theirs in zip(
            ours.feed_forward.route(x), theirs.feed_forward.route(x), strict=True
        ):
            assert torch.equal(of_ours, of_theirs)
        outputs = [expert(x) for expert in ours.feed_forward.experts]
        assert not torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize(
    ("num_layers", "num_experts", "quantization", "gigabytes"),
    [
        (24, 32, {"quant_method": "mxfp4"}, 13.8),
        (24, 32, None, 41.8),
        (36, 128, {"quant_method": "mxfp4"}, 65.3),
    ],
)
def test_the_published_models_take(num_layers, num_experts, quantization, gigabytes):
    """As docs/models.md says."""
    fields = {
        "architectures": ["GptOssForCausalLM"],
        "num_hidden_layers": num_layers,
        "num_local_experts": num_experts,
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rope_parameters": YARN,
        "dtype": "bfloat16",
        "quantization_config": quantization,
    }
    fields = JsonFields(Path("config.json"), "", fields)
    sizes, stored = [], read_stored_format(fields)
    weights = Weights(
        *(set(), torch.bfloat16, torch.device("meta"), lambda _, out: sizes.append(out.nbytes)),
        stored=stored,
    )
    build_gpt_oss(read_gpt_oss_config(fields), weights)
    assert round(sum(sizes) / 1e9, 1) == gigabytes


def test_on_a_gpu_experts_are_grouped_and_packed(published, monkeypatch):
    packed, _ = published
    expected = Sequence(random_prompt(20, seed=3))
    PagedLoop(load(packed, torch.float32), block_size=8).generate([expected], 1)
    monkeypatch.setattr(gpu_linear, "is_here", lambda device: device.type == "cpu")
    monkeypatch.setattr(QuantizedLinear, "compile", lambda *_: None)
    model = load(packed, torch.float16)
    tensors = load_file(packed / "model.safetensors")
    in_file = sum(t.nbytes for name, t in tensors.items() if name.endswith(("_blocks", "_scales")))
    held = 0
    for layer in model.layers:
        for grouped in (layer.feed_forward.gate_up, layer.feed_forward.down):
            held += grouped.values.nbytes + grouped.scales.nbytes
    assert held == in_file
    sequence = Sequence(random_prompt(20, seed=3))
    PagedLoop(model, block_size=8).generate([sequence], 1)
    logits, near = torch.stack(expected.logits), torch.stack(sequence.logits)
    assert (near - logits).norm() < 0.03 * logits.norm()


def test_the_log_counts_packed_weights(published):
    packed, _ = published
    with capture_logs() as logs:
        load(packed)
    (log,) = (log for log in logs if log["event"] == "quantized checkpoint")
    num_weights = 3 * 6 * 3 * 64 * 96  # layers, experts, maps
    key = "dequantized_weights" if native() is None else "packed_weights"
    assert (log["kind"], log[key]) == ("mxfp4", num_weights)


def test_experts_that_no_kernel_takes_are_dequantized(published, monkeypatch):
    packed, plain = published
    monkeypatch.setattr(native_linear, "can_pack_mxfp4", lambda *_: False)
    with capture_logs() as logs:
        model = load(packed)
    (log,) = (log for log in logs if log["event"] == "quantized checkpoint")
    assert (log["packed_weights"], log["dequantized_weights"]) == (0, 3 * 6 * 3 * 64 * 96)
    sequence = Sequence(random_prompt(41, seed=1))
    PagedLoop(model, block_size=8).generate([sequence], 32)
    assert_equals_transformers(plain, sequence)


def test_random_weights_need_no_files_with_weights(published):
    source = open_model(published[0], is_dummy=True)
    model = source.load(torch.float32, CPU, lambda _: None)
    sequence = Sequence(random_prompt(20, seed=1))
    PagedLoop(model, block_size=8).generate([sequence], 4)
    assert len(sequence.output) == 4
    assert torch.stack(sequence.logits).isfinite().all()


def test_other_maps_may_be_quantized_and_experts_are_not(published):
    packed, plain = published
    prompt = random_prompt(41, seed=1)
    whole, rounded = Sequence(prompt), Sequence(prompt)
    PagedLoop(load(packed), 8).generate([whole], 1)
    model = open_model(packed, "", Quantization.INT8).load(torch.float32, CPU, lambda _: None)
    PagedLoop(model, 8).generate([rounded], 1)
    logits = torch.stack(whole.logits)
    assert 0 < (torch.stack(rounded.logits) - logits).norm() < 0.2 * logits.norm()
    in_float32 = open_model(plain, "", Quantization.INT4).load(torch.float32, CPU, lambda _: None)
    PagedLoop(in_float32, 8).generate([Sequence(prompt)], 4)


@pytest.mark.parametrize(("scale", "why"), [(255, "NaN"), (241, "241; at most 240 is supported")])
def test_a_scale_beyond_those_of_kernels_is_refused(published, tmp_path, scale, why):
    packed = shutil.copytree(published[0], tmp_path / "odd")
    tensors = load_file(packed / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    tensors[name][2, 5, 1] = scale
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=f"{name} has {why}"):
        load(packed)


def test_ranks_share_groups_of_numbers(published):
    packed, _ = published
    config = open_model(packed, place=Place(tensor_size=1)).local_config
    assert config.intermediate_size == 96
    with pytest.raises(ModelError, match="tensor-parallel-size is 2; it must divide the 3 groups"):
        open_model(packed, place=Place(tensor_size=2))


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (20, None, 20)),
        ({"sliding_window": None}, (None, None, None)),
        ({"layer_types": None}, (20, None, 20)),
        (
            {"layer_types": ["full_attention", "full_attention", "sliding_attention"]},
            (None, None, 20),
        ),
    ],
)
def test_windows_by_layer(published, tmp_path, changes, windows):
    directory = shutil.copytree(published[0], tmp_path / "model")
    config = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(config))
    assert open_model(directory).config.windows == windows
