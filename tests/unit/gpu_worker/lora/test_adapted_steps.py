"""Rows with adapters get the tokens of merged weights, whatever rows compute beside them."""

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from fake_graphs import FakeGraphs

from gpu_worker.executor import Executor
from gpu_worker.kv_layout import kv_dtypes
from gpu_worker.kv_pool import KvPool
from gpu_worker.lora.adapter_loading import load_adapter
from gpu_worker.model_source import open_model
from gpu_worker.models.quantized_linear import Quantization
from gpu_worker.sampling_params import SamplingParams
from gpu_worker.step import Limits, NewRow, StepInput
from kernels.cpu.library import native
from tests.lora_fixture import make_adapter, merge
from tests.models_fixture import ModelDirs
from tests.unit.gpu_worker.models.against_transformers import greedy_continuation
from tests.unit.gpu_worker.models.paged_loop import CPU, random_prompt

BLOCK_SIZE, NUM_TOKENS, CHUNK = 8, 64, 16
LIMITS = Limits(
    max_num_seqs=6,
    max_model_len=160,
    max_num_batched_tokens=128,
    num_blocks=120,
    block_size=BLOCK_SIZE,
    vocab_size=500,
)
has_native_linear = (library := native()) is not None and library.has_linear


@dataclass(frozen=True)
class Case:
    """A model, two adapters, and what each makes of it: checkpoints by the adapter's number."""

    model: object
    merged: tuple


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory):
    return ModelDirs(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def case(request, model_dirs, tmp_path_factory):
    return make_case(model_dirs.get(request.param), tmp_path_factory.mktemp("adapters"))


def make_case(model, root):
    make_adapter(root / "a", model, seed=1)
    make_adapter(root / "b", model, 2, rank=3, alpha=5, targets=("v_proj", "up_proj", "o_proj"))
    merged = tuple(merge(root / f"merged-{name}", model, root / name) for name in "ab")
    return Case(model, (model, *merged))


class Worker:
    """An executor over a pool that it gives out in order; row i is that of prompt i."""

    def __init__(self, case, dtype=torch.float32, quantization=None, drafter=None):
        source = open_model(case.model, "", quantization)
        root = case.merged[1].parent
        loaded = [load_adapter(name, root / name, source.config, dtype, CPU) for name in "ab"]
        adapters = dict(enumerate(loaded, start=1))
        self.executor = Executor(
            source.load(dtype, CPU, lambda _: None),
            KvPool(
                source.config,
                LIMITS.num_blocks,
                BLOCK_SIZE,
                kv_dtypes("auto", set(), dtype, source.config.num_layers),
                CPU,
            ),
            replace(LIMITS, adapters={adapter.id: n for n, adapter in adapters.items()}),
            (),
            CPU,
            adapters=adapters,
            drafter=drafter,
        )

    @torch.inference_mode()
    def generate(self, prompts, numbers, starts=None, before_step=lambda _: None):
        """The tokens of each prompt under the adapter of its number, and their logprobs."""
        starts = starts or [0] * len(prompts)
        left = [len(prompt) for prompt in prompts]
        tokens, logprobs = defaultdict(list), defaultdict(list)
        num_blocks = -(-LIMITS.max_model_len // BLOCK_SIZE)
        released, step_id = [], 0
        while len(released) < len(prompts):
            step_id += 1
            before_step(step_id)
            new = [i for i, start in enumerate(starts) if start == step_id - 1]
            chunks = [i for i, n in enumerate(left) if n and starts[i] < step_id]
            lens = [min(left[i], CHUNK) for i in chunks]
            done = [i for i in tokens if len(tokens[i]) >= NUM_TOKENS and i not in released]
            released += done
            decoding = [i for i in tokens if i not in released]
            result = self.executor.step(
                StepInput(
                    step_id,
                    len(decoding),
                    released_rows=np.array(done, np.int32),
                    new_rows=tuple(
                        NewRow(
                            seq_id=i,
                            row=i,
                            token_ids=np.array(prompts[i], np.int32),
                            num_prompt_tokens=len(prompts[i]),
                            num_computed_tokens=0,
                            block_ids=np.arange(i * num_blocks, (i + 1) * num_blocks).astype("i4"),
                            sampling=SamplingParams(seed=0, temperature=0, logprobs=0),
                            max_total_tokens=LIMITS.max_model_len,
                            adapter=numbers[i],
                        )
                        for i in new
                    ),
                    chunk_rows=np.array(chunks, np.int32),
                    chunk_lens=np.array(lens, np.int32),
                )
            )
            for i, n in zip(chunks, lens, strict=True):
                left[i] -= n
            rows = result.sampled_rows.tolist()
            for row, token in zip(rows, result.sampled_token_ids.tolist(), strict=True):
                tokens[row].append(token)
            for logprob in result.logprobs:
                logprobs[rows[logprob.index]].append(logprob.logprob)
        return [(tokens[i][:NUM_TOKENS], logprobs[i][:NUM_TOKENS]) for i in range(len(prompts))]


def token_lists(results):
    return [tokens for tokens, _ in results]


class Oracle:
    """Guesses what each row will get, and in every other guess a wrong last token."""

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


PROMPTS = [random_prompt(length, seed=length) for length in (21, 40, 3, 33)]
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


def test_one_prompt_under_all(case):
    results = token_lists(Worker(case).generate(ONE_PROMPT, [0, 1, 2]))
    assert results == expected(case, ONE_PROMPT, [0, 1, 2])
    assert len({tuple(tokens) for tokens in results}) == 3


def test_one_comes_while_others_run_and_goes_when_its_row_is_released(case):
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


def test_only_steps_without_an_adapter_replay_graphs(llama):
    worker, graphs = Worker(llama), FakeGraphs()
    worker.executor.capture_graphs(graphs, lambda _: None)
    prompts, numbers = ONE_PROMPT[:2], [2, 0]  # as long as each other: neither decodes alone
    results = worker.generate(prompts, numbers)
    assert token_lists(results) == expected(llama, prompts, numbers)
    assert not graphs.num_replays
    worker.executor.reset()
    results = worker.generate(PROMPTS[:1], [0])
    assert token_lists(results) == expected(llama, PROMPTS[:1], [0])
    assert graphs.num_replays


@pytest.mark.parametrize("quantization", [None, Quantization.INT8])
@pytest.mark.skipif(not has_native_linear, reason="this CPU has no dot product of bfloat16")
def test_company_changes_no_bit(llama, quantization):
    numbers = [1, 0, 2, 1]
    alone = [
        Worker(llama, torch.bfloat16, quantization).generate([prompt], [number])[0]
        for prompt, number in zip(PROMPTS, numbers, strict=True)
    ]
    worker = Worker(llama, torch.bfloat16, quantization)
    assert worker.generate(PROMPTS, numbers, starts=[0, 1, 3, 7]) == alone
