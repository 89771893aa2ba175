"""A conversation whose KV goes down the tiers while a tool runs, and comes back with the result."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
import torch

from gpu_worker.kv.layout import block_bytes
from gpu_worker.models.registry import open_model
from tests.e2e.child import eventually
from tests.e2e.generation import generate_request, read
from tests.e2e.service import Service

BLOCK_SIZE = 16
NUM_BLOCKS = 48
_PROMPT_LEN, _OUTPUT_LEN = 750, 18
"""Together they need all blocks, so the scheduler gives up all pins."""


@pytest.fixture(scope="module")
def service(
    long_llama: Path, run_dir: Callable[[], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """A service with a quarter of the device's blocks on the host, and a disk for all."""
    directory = run_dir()
    block_gb = block_bytes(open_model(long_llama).config, BLOCK_SIZE, torch.float32) / 1024**3
    worker = [f"--num-blocks={NUM_BLOCKS}", "--served-model-name=tiny"]
    worker += [f"--host-kv-memory-gb={NUM_BLOCKS // 4 * block_gb}"]
    worker += [f"--disk-kv-memory-gb={2000 * block_gb}"]
    worker += [f"--disk-kv-dir={tmp_path_factory.mktemp('disk')}"]
    router = [f"--turn-store={directory}/turns.sqlite", "--served-model-name=tiny"]
    scheduler = ["--preemption-mode=swap"]
    with Service(
        directory, long_llama, worker=worker, scheduler=scheduler, router=router
    ) as service:
        yield service


@pytest.fixture(scope="module")
def others(service: Service) -> Callable[[], None]:
    """Runs another client's request, which needs all blocks."""
    firsts = itertools.count(5)

    def run() -> None:
        prompt = [next(firsts), *range(60, 60 + _PROMPT_LEN - 1)]
        prompt = [token % 400 + 5 for token in prompt]
        read(
            service.stub.Generate(generate_request(prompt, max_tokens=_OUTPUT_LEN, ignore_eos=True))
        )

    return run


@pytest.fixture(autouse=True)
def _nothing_is_pinned(service: Service, others: Callable[[], None]) -> None:
    """Frees what other tests have pinned."""
    push_down(service, others, lambda load: not load.num_pinned_blocks)


def say(service: Service, text: str, **more: object) -> openai.types.responses.Response:
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0)
    with client:
        return client.responses.create(
            model="tiny", input=text, max_output_tokens=8, temperature=0.0, **more
        )


def num_blocks_of(response: openai.types.responses.Response) -> int:
    """Returns how many blocks prompt and output fill; the last token is not computed."""
    return (response.usage.total_tokens - 1) // BLOCK_SIZE


def push_down(service: Service, others: Callable[[], None], is_down: Callable[..., bool]) -> None:
    """Lets others run until the conversation is where the test wants it."""

    def look() -> bool | None:
        others()
        return is_down(service.load()) or None

    eventually(look, "the conversation is pushed down")


def test_a_conversation_comes_back_from_the_lower_tiers(service, others):
    first = say(service, "Read this. " * 12, prompt_cache_key="agent")
    num_pinned = first.usage.input_tokens_details.cache_write_tokens
    assert num_pinned >= 2 * BLOCK_SIZE
    assert service.load().num_pinned_blocks == num_blocks_of(first)
    # The tool runs. Others need the blocks.
    push_down(service, others, lambda load: not load.num_pinned_blocks)
    result = {"previous_response_id": first.id}
    second = say(service, "The tool says 7.", **result)
    assert second.usage.input_tokens_details.cached_tokens >= num_pinned
    cold = say(service, "The tool says 7.", **result, extra_body={"cache_salt": "cold"})
    assert cold.usage.input_tokens_details.cached_tokens == 0
    assert second.output_text == cold.output_text


def test_a_conversation_comes_back_from_the_disk_after_its_worker_was_killed(service, others):
    first = say(service, "Remember that. " * 12, prompt_cache_key="agent")
    num_pinned = first.usage.input_tokens_details.cache_write_tokens
    assert num_pinned >= 2 * BLOCK_SIZE
    num_stored = service.load().num_stored_blocks
    push_down(
        service,
        others,  # the oldest blocks on the host go to the disk when it is full
        lambda load: load.num_stored_blocks >= num_stored + 2 * NUM_BLOCKS,
    )
    service.worker.kill()
    service.start_worker()

    def has_found() -> bool | None:
        load = service.load()
        return (load.num_cached_disk_blocks > 0 and not load.num_cached_host_blocks) or None

    eventually(has_found, "the next worker has found blocks")
    result = {"previous_response_id": first.id}
    second = say(service, "And now?", **result)
    assert second.usage.input_tokens_details.cached_tokens >= num_pinned
    cold = say(service, "And now?", **result, extra_body={"cache_salt": "cold"})
    assert second.output_text == cold.output_text


def test_a_conversation_that_is_deleted_is_unpinned(service):
    first = say(service, "Forget this. " * 12, prompt_cache_key="agent")
    assert service.load().num_pinned_blocks == num_blocks_of(first) > 0
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0)
    with client:
        client.responses.delete(first.id)
    eventually(lambda: not service.load().num_pinned_blocks or None, "the pins are dropped")
