"""KV between workers by NIXL: exact tokens, whichever side is killed (`make nixl-test`)."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.child import eventually
from tests.e2e.generation import read
from tests.e2e.test_roles import Apart, expected_of, read_all, request_of
from tests.e2e.two_workers import Stream

pytest.importorskip("nixl", reason="quire[nixl] is not installed")

NUM_ROUNDS = 2


@pytest.fixture(scope="module")
def apart(long_llama: Path, run_dir: Callable[[], Path]) -> Iterator[Apart]:
    service = Apart(run_dir(), long_llama)
    for flags in (service._flags["worker"], service._other_flags):
        flags.append("--kv-transfer=nixl")
    with service:
        service.wait_until_both_are_attached()
        yield service


def pulled_bytes(apart: Apart) -> dict[str, float]:
    """The KV that the decode worker has got, by means."""
    _, body = apart._get(apart.other, "/metrics")
    name = r'quire_worker_kv_pulled_bytes_total{means="(\w+)"} (.+)'
    found = {means: float(value) for means, value in re.findall(name, body.decode())}
    return {"grpc": 0.0, "nixl": 0.0, **found}


def test_requests_move_by_nixl_with_exact_tokens(apart, service):
    requests = [request_of(f"r{i}", 60 + 37 * i, 600, n=1 + i % 2) for i in range(4)]
    before = pulled_bytes(apart)
    assert read_all(apart, requests) == expected_of(service, requests)
    after = pulled_bytes(apart)
    assert after["nixl"] > before["nixl"]
    assert after["grpc"] == before["grpc"]


@pytest.mark.parametrize("killed", ["prefill", "decode"])
def test_kills_while_kv_moves_lose_nothing(apart, service, killed):
    child = apart.worker if killed == "prefill" else apart.other
    for number in range(NUM_ROUNDS):
        requests = [request_of(f"{killed}-{number}-{i}", 700 + i, 200) for i in range(4)]
        streams = [Stream(apart, each) for each in requests]
        streams[0].read_until(1)  # the first prompt is computed, and moves; others are computed
        child.kill()
        assert [stream.read_to_end() for stream in streams] == expected_of(service, requests)
        if killed == "prefill":
            apart.start_first_again()
        else:
            apart.start_decode_worker()
            apart.wait_until_both_are_attached()
    before = pulled_bytes(apart)["nixl"]
    late = request_of(f"{killed}-late", 90, 1500)
    late.token_ids.ids[0] = 400 + len(killed)  # a prefix that the decode worker has not cached
    stream = Stream(apart, late)
    stream.read_until(1)
    eventually(lambda: apart.where_is(late.request_id) == apart.decode or None, "it decodes there")
    stream.cancel()
    assert pulled_bytes(apart)["nixl"] > before
    assert read(apart.stub.Generate(request_of("last", 20, 8))).outputs
