"""A native program for steps with adapters equals the layers run op by op."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from gpu_worker.lora.adapter_files import load_adapter
from gpu_worker.lora.step_adapters import StepAdapters, step_adapters
from gpu_worker.models.registry import open_model
from gpu_worker.weights.quantized_linear import Quantization
from kernels.cpu.library import native
from kernels.cpu.program import decoder
from kernels.cpu.program.inputs import NativeInputs
from tests.kernels.late_threads import LateThreads
from tests.lora_fixture import make_adapter
from tests.models_fixture import ModelDirs
from tests.unit.gpu_worker.lora.adapted_worker import PROMPTS, Case, Worker, make_case
from tests.unit.gpu_worker.models.paged_loop import CPU

pytestmark = pytest.mark.skipif(
    native() is None,
    reason="needs native code",
)
BF16 = torch.bfloat16
ODD_WIDTHS = {
    "hidden_size": 65,
    "intermediate_size": 111,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
NUMBERS, STARTS = [1, 0, 2, 1], [0, 1, 3, 7]


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory):
    return ModelDirs(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def llama(model_dirs, tmp_path_factory):
    return make_case(model_dirs.get("llama"), tmp_path_factory.mktemp("adapters"))


def has_no_code(worker):
    """The worker without native code for its adapters."""
    table = worker.executor._adapters._adapters
    table |= {number: replace(adapter, native=None) for number, adapter in table.items()}
    return worker


def refuse(*_):
    raise AssertionError("layer by layer")


def generate(worker, **options):
    return worker.generate(PROMPTS, NUMBERS, starts=STARTS, **options)


def assert_same_op_by_op(case, monkeypatch, **options):
    with monkeypatch.context() as patch:
        patch.setattr(StepAdapters, "onto", refuse)
        results = generate(Worker(case, BF16, **options))
    assert results == generate(has_no_code(Worker(case, BF16, **options)))


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 20}),
        ("mistral", {"num_key_value_heads": 1, "sliding_window": 9}),
        ("phi3", {}),
        ("qwen2", ODD_WIDTHS),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
)
def test_it_gives_the_bits_of_the_ops(model_dirs, tmp_path, monkeypatch, family, overrides):
    case = make_case(model_dirs.get(family, **overrides), tmp_path)
    assert_same_op_by_op(case, monkeypatch)


@pytest.mark.parametrize(
    "options", [{"quantization": Quantization.INT8}, {"kv_cache_dtype": "fp8"}]
)
def test_it_gives_the_bits_of_the_ops_with_quantized_weights_or_cache(llama, monkeypatch, options):
    assert_same_op_by_op(llama, monkeypatch, **options)


@pytest.mark.parametrize("num_layers", [1, 5])
def test_it_gives_the_bits_of_the_ops_where_layers_share_memory_in_turn(
    model_dirs, tmp_path, monkeypatch, num_layers
):
    monkeypatch.setattr(decoder, "_APART_BYTES", 0)
    case = make_case(model_dirs.get("llama", num_hidden_layers=num_layers), tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert_same_op_by_op(case, monkeypatch)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("numbers", [NUMBERS, [0, 0, 0, 0]])
def test_threads_may_be_late(model_dirs, tmp_path, monkeypatch, numbers):
    monkeypatch.setattr(decoder, "_APART_BYTES", 0)
    case = make_case(model_dirs.get("llama", num_hidden_layers=5), tmp_path)
    expected = Worker(case, BF16).generate(PROMPTS, numbers, starts=STARTS)
    late = LateThreads(seed=1)
    monkeypatch.setattr(native(), "run", late)
    assert Worker(case, BF16).generate(PROMPTS, numbers, starts=STARTS) == expected
    assert late.num_redone


def test_one_that_adds_to_no_map_of_a_step_s_rows_changes_nothing_there(llama):
    alone = Worker(llama, BF16).generate(PROMPTS[:1], [0])
    assert Worker(llama, BF16).generate(PROMPTS[:2], [0, 1])[:1] == alone


def test_another_adapter_by_the_same_number_at_the_same_addresses(llama, model_dirs, tmp_path):
    make_adapter(tmp_path / "other", model_dirs.get("llama"), seed=9)
    config = open_model(llama.model, "").config
    other = load_adapter("other", tmp_path / "other", config, BF16, CPU)
    worker = Worker(llama, BF16)
    table = worker.executor._adapters._adapters
    before = worker.generate(PROMPTS[:1], [1])
    worker.executor.reset()
    table[1], first = other, table[1]
    after = worker.generate(PROMPTS[:1], [1])
    assert after != before
    for to, of in zip(first.layers, other.layers, strict=True):
        for name, low_rank in to.items():
            low_rank.down.panels.copy_(of[name].down.panels)
            low_rank.up.panels.copy_(of[name].up.panels)
    worker.executor.reset()
    table[1] = first
    assert worker.generate(PROMPTS[:1], [1]) == after


def test_adapters_of_another_dtype_have_no_native_form(llama):
    path, config = llama.merged[1].parent / "a", open_model(llama.model, "").config
    assert load_adapter("a", path, config, BF16, CPU).native is not None
    assert load_adapter("a", path, config, torch.float32, CPU).native is None


def test_layers_of_experts_run_op_by_op(model_dirs, tmp_path):
    model = model_dirs.get("mixtral")
    for name, seed in (("a", 1), ("b", 2)):
        make_adapter(tmp_path / name, model, seed, targets=("q_proj", "o_proj"))
    case = Case(model, (model, tmp_path / "merged"))
    together = generate(Worker(case, BF16))
    for prompt, number, result in zip(PROMPTS, NUMBERS, together, strict=True):
        assert Worker(case, BF16).generate([prompt], [number]) == [result]


def test_a_number_of_tokens_that_does_not_fit_is_named(llama):
    worker = Worker(llama, BF16)
    adapters = step_adapters(np.array([1, 0, 1]), worker.executor._adapters.by_number, CPU)
    inputs = NativeInputs(
        hidden=torch.zeros(2, 64, dtype=BF16),
        positions=torch.tensor([0, 1]),
        slot_mapping=torch.tensor([0, 1]),
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        seq_lens=torch.tensor([2], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 2], dtype=torch.int32),
        adapters=adapters.native,
    )
    with pytest.raises(ValueError, match="adapters is those of 3, required are those of 2 tokens"):
        inputs.check(64)
