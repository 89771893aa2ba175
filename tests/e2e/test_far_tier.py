"""Two services that share prefixes through a directory; it is damaged, then deleted under load."""

import shutil
import threading
from pathlib import Path

from tests.e2e.child import eventually
from tests.e2e.generation import read
from tests.e2e.service import Service
from tests.e2e.test_roles import expected_of, request_of

NUM_PROMPTS = 4


def prompts(name: str) -> list:
    """Requests of different prompts, long enough to be worth a fetch."""
    requests = [request_of(f"{name}-{number}", 1500, 8) for number in range(NUM_PROMPTS)]
    for number, request in enumerate(requests):
        request.token_ids.ids[0] = 400 + number
    return requests


def files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def test_second_service_has_cached_tokens_and_survives_the_store(long_llama, run_dir, service):
    far = run_dir() / "far"
    flags = ("--num-blocks=512", "--host-kv-memory-gb=0.05", f"--far-kv-url=file://{far}")
    expected = expected_of(service, prompts("expected"))
    with Service(run_dir(), long_llama, worker=flags) as first:
        for request, outputs in zip(prompts("first"), expected, strict=True):
            assert read(first.stub.Generate(request)).outputs == outputs
        num_blocks = NUM_PROMPTS * (1499 // 16)
        eventually(lambda: len(files(far)) >= num_blocks or None, "all blocks are stored")
    damaged = files(far)
    for path in damaged[:: len(damaged) // 2]:  # two prompts may lack a block
        path.write_bytes(path.read_bytes()[:-1])
    with Service(run_dir(), long_llama, worker=flags) as second:
        # A fetch may be slower than computing on a busy machine, so one of several must succeed.
        results = [read(second.stub.Generate(request)) for request in prompts("second")]
        assert [result.outputs for result in results] == expected
        assert max(result.usage.cached_tokens for result in results) > 0
        outputs: list = [None] * NUM_PROMPTS
        requests = [request_of(f"load-{number}", 900 + number, 200) for number in range(4)]

        def run(number: int) -> None:
            outputs[number] = read(second.stub.Generate(requests[number])).outputs

        threads = [threading.Thread(target=run, args=(n,)) for n in range(NUM_PROMPTS)]
        for thread in threads:
            thread.start()
        shutil.rmtree(far, ignore_errors=True)
        for thread in threads:
            thread.join()
        assert outputs == expected_of(service, requests)
