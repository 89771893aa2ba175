"""With recurrent layers, greedy tokens equal `transformers`, however states move."""

import os
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from quire.v1 import common_pb2
from tests.e2e.child import eventually
from tests.e2e.generation import Result, generate_request, read
from tests.e2e.references import NUM_TOKENS, Search, greedy_tokens, searched_tokens
from tests.e2e.service import Service
from tests.e2e.step_gate import StepGate
from tests.e2e.two_workers import Stream, TwoWorkers
from tests.unit.gpu_worker.models.against_transformers import assert_greedy

LFM2 = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "block_auto_adjust_ff_dim": False,
}
DIES_IN_A_STORE = """
import os, pathlib, signal, sys

died = pathlib.Path(__file__).with_name("died")
write, calls = os.pwritev, []

def half(fd, parts, offset):
    calls.append(offset)
    if len(calls) == 20:
        record = bytes().join(parts)
        os.pwrite(fd, record[: len(record) // 2], offset)
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return write(fd, parts, offset)

if "gpu_worker" in sys.orig_argv and not died.exists():
    os.pwritev = half
"""
"""A `sitecustomize` that kills the first worker in the middle of its 20th disk block."""
PROMPT = [5 + i % 490 for i in range(100)]
LENGTHS = (1, 15, 16, 33, 64, 65, 90)
MODELS = {
    "lfm2": (LFM2, ["--num-blocks=80"]),
    "mamba2": (
        # All its blocks hold states. A sequence holds two, and those of one chunk.
        {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 2},
        ["--num-blocks=20"],
    ),
}
"""Families, with overrides, and pools in which the sequences preempt each other."""


@pytest.mark.parametrize("family", MODELS)
def test_forked_swapped_with_prefix_hits_and_taken_over(model_dirs, run_dir, family):
    overrides, worker = MODELS[family]
    model_dir = model_dirs.get(family, **overrides)
    draw = random.Random(3)
    prompts = [[draw.randrange(5, 500) for _ in range(length)] for length in LENGTHS]
    prompts.append([*prompts[-1][:50], 7])
    outputs = greedy_tokens(model_dir, prompts)
    flags = {
        "worker": [*worker, "--host-kv-memory-gb=0.01"],
        "scheduler": ["--preemption-mode=swap", "--max-prefill-chunk=32"],
    }
    (directory := run_dir()).mkdir()
    gate = StepGate(directory / "gate.sock", directory / "worker.sock")
    with gate, Service(directory, model_dir, **flags, worker_uds=gate.uds) as service:

        def generate(prompt: list[int]) -> Result:
            request = generate_request(prompt, n=2, max_tokens=NUM_TOKENS, ignore_eos=True)
            return read(service.stub.Generate(request, timeout=200))

        totals = Counter()  # of two scheduler processes
        for is_killed in (False, True):
            with ThreadPoolExecutor(len(prompts)) as threads:
                results = [threads.submit(generate, prompt) for prompt in prompts]
                if is_killed:
                    gate.close()
                    gate.let_through(40)
                    eventually(lambda: not gate.num_permits or None, "tokens are sampled")
                    service.scheduler.kill()
                    gate.open()
                    service.start_scheduler()
                for prompt, result, output in zip(prompts, results, outputs, strict=True):
                    assert result.result().outputs == [output] * 2, f"{len(prompt)} tokens"
            totals.update(service.metrics(service.scheduler))
        assert totals["quire_adopted_tokens_total"] > 0
        assert totals["quire_kv_swapped_in_blocks_total"] > 0
        assert totals["quire_prefix_cache_hits_total"] > 0


@pytest.mark.parametrize("family", MODELS)
def test_moved_to_another_worker_which_is_killed(model_dirs, run_dir, family):
    model_dir = model_dirs.get(family, **MODELS[family][0], max_position_embeddings=4096)
    request = generate_request(PROMPT, max_tokens=2000, ignore_eos=True)
    request.request_id = "mover"
    worker = ("--num-blocks=300", "--host-kv-memory-gb=0.01")
    with TwoWorkers(run_dir(), model_dir, worker=worker) as service:
        service.wait_until_both_are_attached()
        stream = Stream(service, request)
        stream.read_until(40)
        source = service.where_is("mover")
        target = service.other_than(source)
        moved = service.migrate("mover", target)
        assert moved.from_worker == source
        assert moved.num_blocks > 0, "its last checkpoint"
        stream.read_until(80)
        service.child(target).kill()
        (output,) = stream.read_to_end()
        assert_greedy(model_dir, PROMPT, output)
        assert len(output) == 2000
        if target == service.targets[0]:
            service.start_first_again()


def test_a_worker_killed_amid_a_store_finds_its_states_on_the_disk(model_dirs, run_dir, tmp_path):
    model_dir = model_dirs.get("mamba")  # all its blocks hold states
    draw = random.Random(4)
    prompts = [[draw.randrange(5, 500) for _ in range(90)] for _ in range(12)]
    outputs = greedy_tokens(model_dir, prompts, 40)
    worker = ["--num-blocks=60", "--host-kv-memory-gb=0.0002", "--kv-checksum"]
    worker += ["--disk-kv-memory-gb=0.05", f"--disk-kv-dir={tmp_path}"]
    (tmp_path / "sitecustomize.py").write_text(DIES_IN_A_STORE)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    flags = {
        "worker": worker,
        "scheduler": ["--preemption-mode=swap"],  # loads blocks, also where computing is faster
    }
    with Service(run_dir(), model_dir, **flags, env={"PYTHONPATH": path}) as service:

        def generate(prompt: list[int]) -> Result:
            request = generate_request(prompt, max_tokens=40, ignore_eos=True)
            return read(service.stub.Generate(request, timeout=200))

        with ThreadPoolExecutor(1) as thread:
            alone = thread.submit(lambda: [generate(prompt).outputs[0] for prompt in prompts])
            eventually(lambda: (tmp_path / "died").exists() or None, "the worker dies in a store")
            service.worker.kill()
            service.start_worker()
            eventually(lambda: service.load().num_cached_disk_blocks or None, "blocks are found")
            assert alone.result() == outputs
        results = [generate(prompt) for prompt in prompts]
        assert [result.outputs[0] for result in results] == outputs
        assert sum(result.usage.cached_tokens for result in results) > 0
        assert service.metrics(service.scheduler)["quire_kv_failed_disk_moves_total"] == 0


def test_beams_equal_transformers_beside_other_requests(model_dirs, run_dir):
    model_dir = model_dirs.get("lfm2", **LFM2)
    draw = random.Random(5)
    prompt = tuple(draw.randrange(5, 500) for _ in range(37))
    searches = [Search(prompt[:length], 4, 2, 40) for length in (15, 16, 37)]
    found = searched_tokens(model_dir, searches)
    (output,) = greedy_tokens(model_dir, [prompt], 40)
    with Service(run_dir(), model_dir, worker=["--num-blocks=400"]) as service:

        def search(search: Search) -> Result:
            beam = common_pb2.BeamSearch(
                width=search.width,
                length_penalty=1.0,
                early_stopping=common_pb2.EARLY_STOPPING_HEURISTIC,
            )
            request = generate_request(
                search.prompt, n=search.n, max_tokens=40, ignore_eos=True, beam=beam
            )
            return read(service.stub.Generate(request, timeout=200))

        with ThreadPoolExecutor(4) as threads:
            results = [threads.submit(search, each) for each in searches]
            plain = generate_request(prompt, max_tokens=40, ignore_eos=True)
            assert read(service.stub.Generate(plain, timeout=200)).outputs == [output]
            assert [result.result().outputs for result in results] == found
