"""GGUF files against `transformers`, which decodes them by itself."""

import pytest
import torch
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM, GgufConfig

from kernels.cpu.linear import can_pack_integers
from model_files.locate import find_model
from tests.gguf_fixture import K_KINDS, KINDS, SIZES, SMALL_KINDS, write_gguf
from tests.unit.gpu_worker.models.against_transformers import NUM_TOKENS, assert_equals_transformers
from tests.unit.gpu_worker.models.paged_loop import PagedLoop, Sequence, load, random_prompt


@pytest.fixture
def as_directory(model_dirs, tmp_path):
    """Writes a file of a family and a kind; returns it and the directory laid out for it."""

    def make(family, kind, **metadata):
        overrides = SIZES | metadata.pop("overrides", {})
        source = model_dirs.get(family, **overrides)
        file = write_gguf(source, tmp_path / f"{family}-{kind}.gguf", kind, **metadata)
        return file, find_model(str(file), tmp_path / "cache")

    return make


def _oracle(file, directory):
    """A directory in which transformers has decoded the file."""
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(directory)
    return directory


@torch.inference_mode()
def _perplexity(logits, tokens):
    return torch.nn.functional.cross_entropy(logits, tokens).exp().item()


@pytest.mark.parametrize(
    ("family", "kind", "overrides"),
    [
        *(("llama", kind, {}) for kind in KINDS),
        ("qwen2", "Q8_0", {"tie_word_embeddings": True}),
        ("qwen3", "Q5_1", {"head_dim": 128}),  # transformers ignores a file's head dim
    ],
)
def test_greedy_tokens_equal_those_of_transformers(as_directory, tmp_path, family, kind, overrides):
    file, directory = as_directory(family, kind, overrides=overrides)
    oracle = _oracle(file, tmp_path / "oracle")
    sequence = Sequence(random_prompt(41, seed=1))
    PagedLoop(load(directory), block_size=16).generate([sequence], NUM_TOKENS)
    assert_equals_transformers(oracle, sequence)
    tokens = torch.tensor(sequence.tokens)
    reference = AutoModelForCausalLM.from_pretrained(oracle, dtype=torch.float32)
    logits = reference(tokens[None, :-1]).logits[0]
    ours = _perplexity(torch.stack(sequence.logits)[:40], tokens[1:41])
    assert ours == pytest.approx(_perplexity(logits[:40], tokens[1:41]), rel=1e-3)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [("mixtral", {"sliding_window": None}), ("qwen3_moe", {"norm_topk_prob": True})],
)
def test_experts_that_a_file_joins_are_taken_apart(as_directory, model_dirs, family, overrides):
    """Transformers cannot read this file; it has the directory that the file was made from."""
    overrides |= {"rope_parameters": {"rope_theta": 10000.0}}
    _, directory = as_directory(family, "F32", overrides=overrides)
    sequence = Sequence(random_prompt(41, seed=1))
    PagedLoop(load(directory), block_size=16).generate([sequence], NUM_TOKENS)
    assert_equals_transformers(model_dirs.get(family, **SIZES, **overrides), sequence)


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text"])
def test_gemmas_have_one_more_in_their_norms(as_directory, model_dirs, family):
    """Transformers does not read all of these files; it has the directory that they come from."""
    overrides = {"head_dim": 16, "query_pre_attn_scalar": 16, "num_hidden_layers": 7}
    overrides |= {"attn_logit_softcapping": 50.0} if family == "gemma2" else {}
    overrides |= {"layer_types": None, "sliding_window_pattern": 6, "hidden_size": 64}
    _, directory = as_directory(family, "F32", overrides=overrides)
    sequence = Sequence(random_prompt(41, seed=1))
    PagedLoop(load(directory), block_size=16).generate([sequence], NUM_TOKENS)
    assert_equals_transformers(model_dirs.get(family, **SIZES | overrides), sequence)


DENSE = 2 * 256 * (256 + 2 * 128 + 256 + 3 * 256)
WITH_EXPERTS = 2 * 256 * (64 + 2 * 32 + 64 + 4 * 3 * 64)


@pytest.mark.parametrize(
    ("family", "kind", "num_packed"),
    [
        *(("llama", kind, DENSE) for kind in (*SMALL_KINDS, *K_KINDS)),
        ("qwen3_moe", "Q4_0", WITH_EXPERTS),
    ],
)
def test_bits_stay_packed_where_our_kernel_multiplies(as_directory, family, kind, num_packed):
    if not can_pack_integers(torch.zeros(8, 256, dtype=torch.int8), torch.bfloat16):
        pytest.skip("this CPU has no kernel of ours")
    # All experts: rounded numbers might choose others.
    overrides = {} if family == "llama" else {"num_experts_per_tok": 4}
    _, directory = as_directory(family, kind, overrides=overrides)
    with capture_logs() as logs:
        model = load(directory, torch.bfloat16)
    (log,) = (line for line in logs if line["event"] == "quantized checkpoint")
    assert log["dequantized_weights"] == 0
    assert log["packed_weights"] == num_packed
    packed, decoded = (Sequence(random_prompt(41, seed=1)) for _ in range(2))
    PagedLoop(model, block_size=16).generate([packed], 1, chunk_len=64)
    PagedLoop(load(directory), block_size=16).generate([decoded], 1, chunk_len=64)
    torch.testing.assert_close(
        torch.stack(packed.logits), torch.stack(decoded.logits), rtol=0.05, atol=0.5
    )


def test_several_files_are_one_model(as_directory):
    alone, in_one = as_directory("llama", "Q4_1")
    first, in_three = as_directory("llama", "Q4_1", max_tensors=8)
    assert first.name == "llama-Q4_1-00001-of-00003.gguf"
    expected, found = (Sequence(random_prompt(9, seed=1)) for _ in range(2))
    PagedLoop(load(in_one), block_size=16).generate([expected], 4)
    alone.unlink()
    PagedLoop(load(in_three), block_size=16).generate([found], 4)
    assert found.output == expected.output
    assert torch.equal(torch.stack(found.logits), torch.stack(expected.logits))
