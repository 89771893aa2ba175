"""Two ranks sample the same as one process: each family, tensor and pipeline parallel."""

import pytest

from bench.quantize import FORMS, write
from gpu_worker.models.registry import open_model
from gpu_worker.ranks.shards import Place
from gpu_worker.weights.json_fields import ModelError
from tests.lora_fixture import ALL_TARGETS, make_adapter
from tests.models_fixture import ModelDirs
from tests.mxfp4_fixture import write_mxfp4
from tests.unit.gpu_worker.parallel.ranks import NUM_TOKENS, Case, run, run_ranks

TENSOR, PIPELINE = (2, 1), (1, 2)
FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"num_key_value_heads": 1},
    "mixtral": {},
    "phi3": {},
    "gemma2": {},
    "gemma3_text": {},
    "glm4": {},
    "glm4_moe": {},
    "olmo2": {},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {"tie_word_embeddings": True, "vocab_size": 501},
    "qwen3_moe": {},
    "gpt_neox": {},
    "nemotron": {},
    "stablelm": {"qk_layernorm": True},
    "starcoder2": {"num_key_value_heads": 1},
    "gpt_oss": {},
    "deepseek_v2": {},
    "deepseek_v3": {"attention_bias": True},
    "minicpm3": {},
}
OF_A_PIPELINE = (
    "qwen2",
    "gemma3_text",
    "qwen3",
    "gpt_neox",
    "gpt_oss",
    "olmo2",
    "minicpm3",
    "starcoder2",
)
LATENT_SIZES = {
    "kv_lora_rank": 32,
    "v_head_dim": 16,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
}
WITH_ADAPTERS = [
    (f"{family} adapters{graphs}", sizes)
    for families, sizes in (
        ("llama gemma3_text mistral phi3 gpt_neox stablelm nemotron starcoder2 gpt_oss", TENSOR),
        ("qwen2 gpt_neox", PIPELINE),
    )
    for family in families.split()
    for graphs in ("", " graphs")
    if not (family == "gpt_oss" and graphs)  # on a CPU, experts read numbers on the host
]
SHARED_OUT = [
    *((family, TENSOR) for family in FAMILIES if family != "olmo2"),
    *((family, PIPELINE) for family in OF_A_PIPELINE),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """By variant and sizes: the samples of one process, and of each of two ranks."""
    dirs = ModelDirs(tmp_path_factory.mktemp("models"))
    keys = [*SHARED_OUT, *((name, TENSOR) for name in ("int8", "gptq", "latent gptq", "mxfp4"))]
    cases = [Case(str(dirs.get(name, **FAMILIES[name])), *sizes) for name, sizes in SHARED_OUT]
    cases.append(Case(str(dirs.get("llama", num_hidden_layers=1)), *TENSOR, quantization="int8"))
    directory = dirs.get("llama", num_hidden_layers=1, intermediate_size=96)
    cases.append(Case(str(write(directory, directory / "packed", FORMS["gptq_32"])), *TENSOR))
    directory = dirs.get("deepseek_v2", **LATENT_SIZES)
    cases.append(Case(str(write(directory, directory / "packed", FORMS["gptq_32"])), *TENSOR))
    packed, _ = write_mxfp4(dirs.get("gpt_oss", intermediate_size=64), directory / "mxfp4")
    cases.append(Case(str(packed), *TENSOR))
    graphs = [("llama graphs", TENSOR), ("qwen2 graphs", PIPELINE)]
    for name, sizes in graphs:
        family = name.split()[0]
        directory = dirs.get(family, **FAMILIES[family])
        cases.append(Case(str(directory), *sizes, has_graphs=True))
    keys += graphs
    for name, sizes in WITH_ADAPTERS:
        family = name.split()[0]
        directory = dirs.get(family, **FAMILIES[family])
        adapters = two_adapters(directory)
        has_graphs = name.endswith("graphs")
        cases.append(Case(str(directory), *sizes, has_graphs=has_graphs, adapters=adapters))
    keys += WITH_ADAPTERS
    rank_0, rank_1 = run_ranks(cases, 2)
    alone = {case: run(case, Place(), None) for case in {case.alone for case in cases}}
    expected = [alone[case.alone] for case in cases]
    return dict(zip(keys, zip(expected, rank_0, rank_1, strict=True), strict=True))


def two_adapters(model):
    """Two adapters of different ranks and maps; the second leaves some layers' maps as they are."""
    adapters = []
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    first = attention if model.name.startswith("gpt_oss") else ALL_TARGETS
    for seed, targets in ((1, first), (2, ("v_proj", "up_proj", "o_proj", "qkv_proj", "dense"))):
        directory = model.parent / f"{model.name}-adapter-{seed}"
        if not directory.exists():
            make_adapter(directory, model, seed, rank=5 - seed, targets=targets)
        adapters.append(str(directory))
    return tuple(adapters)


@pytest.mark.parametrize(("name", "sizes"), WITH_ADAPTERS)
def test_ranks_with_adapters_sample_what_one_does(results, name, sizes):
    alone, *ranks = results[name, sizes]
    for rank in ranks:
        assert rank["tokens"] == alone["tokens"]
        assert rank["num_replays"] == (NUM_TOKENS if name.endswith("graphs") else 0)
    assert ranks[0]["prompt"] == pytest.approx(alone["prompt"], abs=1e-3)
    plain = results[name.split()[0], sizes][0]["tokens"]
    differ = [tokens != without for tokens, without in zip(alone["tokens"], plain, strict=True)]
    assert differ == [True, False, True, True]


@pytest.mark.parametrize(("name", "sizes"), SHARED_OUT)
def test_two_ranks_sample_what_one_does(results, name, sizes):
    alone, rank_0, rank_1 = results[name, sizes]
    assert rank_0["tokens"] == alone["tokens"]
    assert rank_1["tokens"] == rank_0["tokens"]


@pytest.mark.parametrize("key", [("llama graphs", TENSOR), ("qwen2 graphs", PIPELINE)])
def test_ranks_that_replay_graphs_sample_what_one_does(results, key):
    alone, *ranks = results[key]
    for rank in ranks:
        assert rank["tokens"] == alone["tokens"]
        assert rank["num_whole"] == 3, "of 1, 2 and 4 decodes"
        assert rank["num_replays"] == NUM_TOKENS, "a prompt's, and its decodes'"


@pytest.mark.parametrize("sizes", [TENSOR, PIPELINE])
def test_log_probabilities_are_those_of_one(results, sizes):
    alone, rank_0, _ = results["qwen2", sizes]
    assert rank_0["logprobs"] == pytest.approx(alone["logprobs"], abs=1e-3)
    assert len(rank_0["prompt"]) == len(alone["prompt"]) == 39
    assert rank_0["prompt"] == pytest.approx(alone["prompt"], abs=1e-3)


def test_all_ranks_learn_what_any_of_them_has(results):
    for rank in results["llama", TENSOR][1:]:
        assert rank["least"] == [3, -1]
        assert rank["total"] == [1, 1]
        assert rank["any_has"] == [True, True, False]


def test_a_rank_holds_its_share_of_the_kv(results):
    alone, rank_0, _ = results["llama", TENSOR]
    assert rank_0["block_bytes"] * 2 == alone["block_bytes"]
    alone, rank_0, rank_1 = results["qwen2", PIPELINE]  # 3 layers
    assert [rank_1["block_bytes"] * 3, rank_0["block_bytes"] * 3] == [
        alone["block_bytes"],
        alone["block_bytes"] * 2,
    ]


def test_each_rank_holds_all_latents(results):
    alone, rank_0, _ = results["deepseek_v3", TENSOR]
    assert rank_0["block_bytes"] == alone["block_bytes"]


def test_kv_heads_fewer_than_ranks_are_repeated(results):
    alone, rank_0, _ = results["mistral", TENSOR]
    assert rank_0["block_bytes"] == alone["block_bytes"]


def test_quantized_weights_are_shared_out(results):
    """Not bit for bit, because each rank rounds its share."""
    alone, rank_0, _ = results["int8", TENSOR]
    assert rank_0["prompt"] == pytest.approx(alone["prompt"], abs=0.3)


@pytest.mark.parametrize("name", ["gptq", "latent gptq", "mxfp4"])
def test_a_quantized_checkpoint_is_shared_out(results, name):
    """One of GPTQ's maps cuts groups of 32 in two and is dequantized; the others are not."""
    alone, rank_0, rank_1 = results[name, TENSOR]
    assert rank_0["tokens"] == rank_1["tokens"] == alone["tokens"]
    assert rank_0["prompt"] == pytest.approx(alone["prompt"], abs=1e-3)


def test_queries_normalized_over_all_heads_are_not_split(tmp_path):
    reason = "tensor-parallel-size is 2; it must be 1 for Olmo2ForCausalLM, which normalizes"
    with pytest.raises(ModelError, match=reason):
        open_model(ModelDirs(tmp_path).get("olmo2"), place=Place(tensor_size=2))


@pytest.mark.slow  # four processes
def test_both_ways_at_once(tmp_path):
    dirs = ModelDirs(tmp_path)
    cases = [Case(str(dirs.get(name)), 2, 2) for name in ("qwen2", "gpt_neox", "mixtral")]
    alone = [run(case.alone, Place(), None)["tokens"] for case in cases]
    for results in run_ranks(cases, 4):
        assert [result["tokens"] for result in results] == alone
