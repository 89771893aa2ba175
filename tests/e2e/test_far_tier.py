"""Two services share prefixes through a directory; a test damages it, and deletes it under load."""

import re
import shutil
import threading
from pathlib import Path

from tests.e2e.child import eventually
from tests.e2e.generation import generate_request, read
from tests.e2e.service import Service
from tests.e2e.test_roles import expected_of, request_of

NUM_PROMPTS = 4


def prompts(name: str) -> list:
    """Requests with different prompts, the same at each call, long enough to be worth a fetch."""
    requests = []
    for number in range(NUM_PROMPTS):
        prompt = [400 + number, *(5 + i * 7 % 490 for i in range(1499))]
        requests.append(generate_request(prompt, max_tokens=8, ignore_eos=True))
        requests[-1].request_id = f"{name}-{number}"
    return requests


def loaded(service: Service) -> float:
    """How many blocks the worker has got from the store."""
    _, body = service._get(service.worker, "/metrics")
    name = r'quire_worker_far_blocks_total{move="load",outcome="done"} (.+)'
    return sum(float(value) for value in re.findall(name, body.decode()))


def files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def test_second_service_has_cached_tokens_and_survives_the_store(slow_llama, run_dir):
    far = run_dir() / "far"
    flags = ("--num-blocks=512", "--host-kv-memory-gb=0.05", f"--far-kv-url=file://{far}")
    requests = [request_of(f"load-{number}", 900 + number, 200) for number in range(NUM_PROMPTS)]
    with Service(run_dir(), slow_llama, worker=flags) as first:
        expected_under_load = expected_of(first, requests)
        expected = expected_of(first, prompts("first"))
        num_blocks = NUM_PROMPTS * (1499 // 16 + 899 // 16)
        eventually(lambda: len(files(far)) >= num_blocks or None, "all blocks are stored")
    damaged = files(far)
    for path in damaged[:: len(damaged) // 2]:  # two prompts may lack a block
        path.write_bytes(path.read_bytes()[:-1])
    with Service(run_dir(), slow_llama, worker=flags) as second:
        results = [read(second.stub.Generate(request)) for request in prompts("second")]
        assert [result.outputs for result in results] == expected
        # Computing may win against a fetch; then later requests use its blocks.
        eventually(lambda: loaded(second) or None, "blocks come from the store")
        outputs: list = [None] * NUM_PROMPTS

        def run(number: int) -> None:
            outputs[number] = read(second.stub.Generate(requests[number])).outputs

        threads = [threading.Thread(target=run, args=(n,)) for n in range(NUM_PROMPTS)]
        for thread in threads:
            thread.start()
        shutil.rmtree(far, ignore_errors=True)
        for thread in threads:
            thread.join()
        assert outputs == expected_under_load
