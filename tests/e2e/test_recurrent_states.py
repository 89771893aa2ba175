"""With recurrent layers, greedy tokens equal `transformers`, whatever happens to the states."""

import random
from concurrent.futures import ThreadPoolExecutor

from tests.e2e.child import eventually
from tests.e2e.generation import Result, generate_request, read
from tests.e2e.references import NUM_TOKENS, greedy_tokens
from tests.e2e.service import Service
from tests.e2e.step_gate import StepGate

LFM2 = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "block_auto_adjust_ff_dim": False,
}
LENGTHS = (1, 15, 16, 33, 64, 65, 90)


def test_forked_preempted_with_prefix_hits_and_taken_over(model_dirs, run_dir):
    model_dir = model_dirs.get("lfm2", **LFM2)
    draw = random.Random(3)
    prompts = [[draw.randrange(5, 500) for _ in range(length)] for length in LENGTHS]
    prompts.append([*prompts[-1][:50], 7])
    outputs = greedy_tokens(model_dir, prompts)
    worker = ["--num-blocks=80", "--host-kv-memory-gb=0.01"]
    (directory := run_dir()).mkdir()
    gate = StepGate(directory / "gate.sock", directory / "worker.sock")
    with gate, Service(directory, model_dir, worker=worker, worker_uds=gate.uds) as service:

        def generate(prompt: list[int]) -> Result:
            request = generate_request(prompt, n=2, max_tokens=NUM_TOKENS, ignore_eos=True)
            return read(service.stub.Generate(request, timeout=200))

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
            metrics = service.metrics(service.scheduler)
            if is_killed:
                assert metrics["quire_adopted_tokens_total"] > 0
            else:
                assert metrics["quire_num_preemptions_total"] > 0
                assert metrics["quire_prefix_cache_hits_total"] > 0
