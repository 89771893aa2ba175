"""Rows with adapters get the tokens of merged weights, beside any other rows."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_graphs import FakeGraphs, FakePieces

from gpu_worker.kv.device_pool import KvPool
from gpu_worker.lora import slots
from gpu_worker.lora.adapter_files import load_adapter
from gpu_worker.models.registry import open_model
from gpu_worker.speculative.draft_model import ModelDrafter
from gpu_worker.weights.quantized_linear import Quantization
from kernels.cpu import linear
from kernels.cpu.library import native
from tests.lora_fixture import make_adapter, merge
from tests.models_fixture import ModelDirs
from tests.unit.gpu_worker.lora.adapted_worker import (
    LIMITS,
    NUM_TOKENS,
    PROMPTS,
    Case,
    Worker,
    make_case,
    token_lists,
)
from tests.unit.gpu_worker.models.against_transformers import greedy_continuation
from tests.unit.gpu_worker.models.paged_loop import CPU, random_prompt

has_native_linear = native() is not None


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory):
    return ModelDirs(tmp_path_factory.mktemp("models"))


FAMILIES = {
    "llama": {},
    "phi3": {},
    "qwen2": {},
    "qwen3": {},
    "gemma3_text": {},
    "gpt_neox": {},
    "nemotron": {},
    "stablelm": {"use_parallel_residual": True, "qk_layernorm": True},
    "starcoder2": {},
}


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, model_dirs, tmp_path_factory):
    model = model_dirs.get(request.param, **FAMILIES[request.param])
    return make_case(model, tmp_path_factory.mktemp("adapters"))


class Oracle:
    """Guesses each row's next tokens; in every other guess the last token is wrong."""

    num_draft_tokens = 3

    def __init__(self, texts):
        self.texts = texts
        self.num_guesses = 0

    def prepare(self, step, rows):
        pass

    def catch_up(self, rows, drafting):
        del rows
        return np.ones(len(drafting), np.bool_)

    def guess(self, rows, drafting, most, sampler):
        del sampler
        guesses = []
        for row, count in zip(drafting.tolist(), most.tolist(), strict=True):
            start = rows.num_tokens[row]
            guess = np.array(self.texts[row][start : start + count], np.int32)
            self.num_guesses += 1
            if len(guess) and self.num_guesses % 2:
                guess[-1] = (guess[-1] + 1) % LIMITS.vocab_size
            guesses.append(guess)
        return guesses


ONE_PROMPT = [random_prompt(29, seed=1)] * 3


def expected(case, prompts, numbers):
    return [
        greedy_continuation(case.merged[number], prompt, NUM_TOKENS)
        for prompt, number in zip(prompts, numbers, strict=True)
    ]


def test_alone(case):
    worker = Worker(case)
    for number in (1, 2):
        results = worker.generate(PROMPTS[:1], [number])
        assert token_lists(results) == expected(case, PROMPTS[:1], [number])


def test_with_the_model_and_another_adapter_in_the_same_steps(case):
    numbers = [1, 0, 2, 1]
    results = Worker(case).generate(PROMPTS, numbers, starts=[0, 1, 3, 7])
    assert token_lists(results) == expected(case, PROMPTS, numbers)


def test_adapters_of_attention_beside_experts(model_dirs, tmp_path):
    model, targets = model_dirs.get("gpt_oss"), ("q_proj", "k_proj", "v_proj", "o_proj")
    for name, seed in (("a", 1), ("b", 2)):
        make_adapter(tmp_path / name, model, seed, targets=targets)
    merged = (merge(tmp_path / f"merged-{name}", model, tmp_path / name) for name in "ab")
    case, numbers = Case(model, (model, *merged)), [1, 0, 2, 1]
    results = Worker(case).generate(PROMPTS, numbers, starts=[0, 1, 3, 7])
    assert token_lists(results) == expected(case, PROMPTS, numbers)


def test_one_prompt_under_all(case):
    results = token_lists(Worker(case).generate(ONE_PROMPT, [0, 1, 2]))
    assert results == expected(case, ONE_PROMPT, [0, 1, 2])
    assert len({tuple(tokens) for tokens in results}) == 3


def test_an_adapter_is_added_at_run_time_and_freed_when_its_row_is_released(case):
    worker = Worker(case)
    root = case.merged[1].parent
    late = load_adapter("late", root / "b", open_model(case.model, "").config, torch.float32, CPU)
    held = {}

    def change(step_id):
        if step_id == 3:
            worker.executor.add_adapter(3, late)
        if step_id == 8:
            worker.executor.remove_adapter(3)
            held.update(worker.executor._adapters.by_number)

    results = worker.generate(PROMPTS[:2], [1, 3], starts=[0, 4], before_step=change)
    assert token_lists(results) == expected(case, PROMPTS[:2], [1, 2])
    assert sorted(held) == [1, 2, 3]
    assert sorted(worker.executor._adapters.by_number) == [1, 2]


@pytest.fixture(scope="module")
def llama(model_dirs, tmp_path_factory):
    return make_case(model_dirs.get("llama"), tmp_path_factory.mktemp("adapters"))


def test_rslora_scales_by_the_root_of_the_rank(model_dirs, tmp_path):
    model = model_dirs.get("llama")
    make_adapter(tmp_path / "a", model, 1, alpha=3, use_rslora=True)
    make_adapter(tmp_path / "b", model, 2)
    merged = tuple(merge(tmp_path / f"merged-{name}", model, tmp_path / name) for name in "ab")
    case = Case(model, (model, *merged))
    assert token_lists(Worker(case).generate(PROMPTS[:1], [1])) == expected(case, PROMPTS[:1], [1])


def test_guesses_change_nothing(llama):
    numbers = [1, 0, 2, 1]
    outputs = expected(llama, PROMPTS, numbers)
    oracle = Oracle([prompt + out for prompt, out in zip(PROMPTS, outputs, strict=True)])
    results = Worker(llama, drafter=oracle).generate(PROMPTS, numbers)
    assert token_lists(results) == outputs
    assert oracle.num_guesses > len(PROMPTS)


def test_guesses_are_verified_by_graphs(llama, monkeypatch):
    outputs = expected(llama, PROMPTS, [0] * 4)
    oracle = Oracle([prompt + out for prompt, out in zip(PROMPTS, outputs, strict=True)])
    worker, graphs = Worker(llama, drafter=oracle), FakePieces(monkeypatch)
    worker.executor.capture_pieces(graphs, lambda _: None)
    assert token_lists(worker.generate(PROMPTS, [0] * 4)) == outputs
    assert oracle.num_guesses > len(PROMPTS)
    assert graphs.num_replays > 10


def test_only_steps_without_an_adapter_replay_graphs(llama):
    worker, graphs = Worker(llama), FakeGraphs()
    worker.executor.capture_decodes(graphs, lambda _: None)
    prompts, numbers = ONE_PROMPT[:2], [2, 0]  # of equal length, so that both decode in each step
    results = worker.generate(prompts, numbers)
    assert token_lists(results) == expected(llama, prompts, numbers)
    assert not graphs.num_replays
    worker.executor.reset()
    results = worker.generate(PROMPTS[:1], [0])
    assert token_lists(results) == expected(llama, PROMPTS[:1], [0])
    assert graphs.num_replays


@pytest.fixture
def plain_maps(monkeypatch):
    """Maps as on a GPU, not packed for C."""
    monkeypatch.setattr(linear, "can_pack", lambda _: False)


@pytest.mark.usefixtures("plain_maps")
def test_rows_with_adapters_replay_graphs(case, monkeypatch):
    worker = Worker(case, has_slots=True)
    pieces, graphs = FakePieces(monkeypatch), FakeGraphs()
    for has_adapters in (False, True):
        worker.executor.capture_decodes(graphs, lambda _: None, has_adapters=has_adapters)
        worker.executor.capture_pieces(pieces, lambda _: None, has_adapters=has_adapters)
    numbers = [1, 0, 2, 2]
    results = worker.generate(PROMPTS, numbers, starts=[0, 3, 9, 20])
    assert token_lists(results) == expected(case, PROMPTS, numbers)
    num_replays = graphs.num_replays, pieces.num_replays
    assert sum(num_replays) > 60, "no step was eager"
    worker.executor.reset()
    results = worker.generate(PROMPTS[:1], [0])
    assert token_lists(results) == expected(case, PROMPTS[:1], [0])
    assert graphs.num_replays > num_replays[0]


@pytest.mark.usefixtures("plain_maps")
def test_a_slot_is_taken_again_when_its_adapter_is_gone(llama):
    worker, graphs = Worker(llama, has_slots=True), FakeGraphs()
    worker.executor.capture_decodes(graphs, lambda _: None, has_adapters=True)
    second = worker.executor._adapters.by_number[2]
    for number in (1, 2):
        worker.executor.remove_adapter(number)
    worker.executor.add_adapter(7, second)
    results = worker.generate(PROMPTS[:2], [7, 0])
    assert token_lists(results) == expected(llama, PROMPTS[:2], [2, 0])
    assert graphs.num_replays > NUM_TOKENS // 2


@pytest.mark.usefixtures("plain_maps")
def test_an_adapter_that_does_not_fit_on_another_device_has_no_slot_here(llama):
    worker, graphs = Worker(llama, has_slots=True), FakeGraphs()
    worker.executor.capture_decodes(graphs, lambda _: None, has_adapters=True)
    first = worker.executor._adapters.by_number[1]
    worker.executor.add_adapter(7, replace(first, max_ranks=slots.MAX_RANKS + 1))
    results = worker.generate(PROMPTS[:1], [7])
    assert token_lists(results) == expected(llama, PROMPTS[:1], [1])
    assert not graphs.num_replays


@pytest.mark.usefixtures("plain_maps")
@pytest.mark.parametrize(
    ("limit", "value", "with_slot", "without"),
    # the ranks of the first adapter: 12, 8 and 4
    [("NUM_SLOTS", 1, 1, 2), ("MAX_RANKS", 10, 2, 1)],
)
def test_rows_whose_adapter_has_no_slot_run_eagerly(
    llama, monkeypatch, limit, value, with_slot, without
):
    monkeypatch.setattr(slots, limit, value)
    worker, graphs = Worker(llama, has_slots=True), FakeGraphs()
    worker.executor.capture_decodes(graphs, lambda _: None, has_adapters=True)
    numbers = [with_slot, without]  # the second row ends last
    results = worker.generate(PROMPTS[:2], numbers)
    assert token_lists(results) == expected(llama, PROMPTS[:2], numbers)
    assert not graphs.num_replays
    worker.executor.reset()
    worker.generate(PROMPTS[:1], [with_slot])
    assert graphs.num_replays


def test_a_draft_model_guesses_with_graphs(llama, monkeypatch):
    source = open_model(llama.model)
    pool = KvPool(source.config, LIMITS.num_blocks, LIMITS.block_size, torch.float32, CPU)
    drafter = ModelDrafter(source.load(torch.float32, CPU, lambda _: None), pool, 3, LIMITS, CPU)
    worker, graphs, pieces = Worker(llama, drafter=drafter), FakeGraphs(), FakePieces(monkeypatch)
    drafter.capture_decodes(graphs, lambda _: None)
    drafter.capture_pieces(pieces, lambda _: None)
    outputs = expected(llama, PROMPTS, [0] * 4)
    assert token_lists(worker.generate(PROMPTS, [0] * 4)) == outputs
    assert graphs.num_replays > 5
    assert pieces.num_replays > 5


@pytest.mark.parametrize("quantization", [None, Quantization.INT8])
@pytest.mark.skipif(not has_native_linear, reason="needs native code")
def test_company_changes_no_bit(case, quantization):
    numbers = [1, 0, 2, 1]
    alone = [
        Worker(case, torch.bfloat16, quantization).generate([prompt], [number])[0]
        for prompt, number in zip(PROMPTS, numbers, strict=True)
    ]
    worker = Worker(case, torch.bfloat16, quantization)
    assert worker.generate(PROMPTS, numbers, starts=[0, 1, 3, 7]) == alone


def test_kernels_for_the_maps_of_all_layers_are_compiled(model_dirs, monkeypatch):
    """The first layer has experts, which adapters do not change; the second has none."""
    sizes = set()

    def note(_map, out, x, *_):
        sizes.add((x.shape[1], out.shape[1]))

    monkeypatch.setattr(slots.SlottedMap, "add_to", note)
    config = open_model(model_dirs.get("qwen3_moe", mlp_only_layers=[1])).config
    slots.AdapterSlots(config, CPU).compile(torch.float32)
    assert sizes == {(64, 128), (64, 64), (64, 224), (112, 64)}
