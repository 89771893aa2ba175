"""KV between workers by NIXL: exact tokens, whichever side is killed (`make nixl-test`)."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.child import eventually
from tests.e2e.service import Service
from tests.e2e.test_roles import Apart, expected_of, read_all, request_of
from tests.e2e.two_workers import Stream

pytest.importorskip("nixl", reason="quire[nixl] is not installed")
pytestmark = pytest.mark.timeout(900)

NUM_ROUNDS = 2
WITHOUT_FAILURE_S = 300.0


@pytest.fixture(scope="module")
def apart(long_llama: Path, run_dir: Callable[[], Path]) -> Iterator[Apart]:
    service = Apart(run_dir(), long_llama)
    for flags in (service._flags["worker"], service._other_flags):
        flags.append("--kv-transfer=nixl")
    with service:
        service.wait_until_both_are_attached()
        yield service


def pulled_bytes(apart: Apart) -> dict[str, float]:
    """The KV that the decode worker has pulled, by transport."""
    _, body = apart._get(apart.other, "/metrics")
    name = r'quire_worker_kv_pulled_bytes_total{means="(\w+)"} (.+)'
    found = {means: float(value) for means, value in re.findall(name, body.decode())}
    return {"grpc": 0.0, "nixl": 0.0, **found}


def wait_until_kv_moves_by_nixl(apart: Apart, service: Service) -> None:
    """Repeat a round of requests until NIXL alone moves its KV; check the tokens of every round.

    After a failure, two workers exchange no KV for some seconds. After a read that took too long,
    which a busy machine may cause, they use gRPC for a minute.
    """

    def has_moved() -> bool | None:
        requests = [request_of(f"moves-{i}", 60 + 37 * i, 600, n=1 + i % 2) for i in range(4)]
        before = pulled_bytes(apart)
        assert read_all(apart, requests) == expected_of(service, requests)
        after = pulled_bytes(apart)
        return (after["nixl"] > before["nixl"] and after["grpc"] == before["grpc"]) or None

    eventually(has_moved, "KV moves by NIXL", WITHOUT_FAILURE_S)


def test_requests_move_by_nixl_with_exact_tokens(apart, service):
    wait_until_kv_moves_by_nixl(apart, service)


@pytest.mark.parametrize("killed", ["prefill", "decode"])
def test_kills_while_kv_moves_lose_nothing(apart, service, killed):
    child = apart.worker if killed == "prefill" else apart.other
    for number in range(NUM_ROUNDS):
        requests = [request_of(f"{killed}-{number}-{i}", 700 + i, 200) for i in range(4)]
        streams = [Stream(apart, each) for each in requests]
        # the first prompt is computed and its KV moves; the others are only computed
        streams[0].read_until(1)
        child.kill()
        assert [stream.read_to_end() for stream in streams] == expected_of(service, requests)
        if killed == "prefill":
            apart.start_first_again()
        else:
            apart.start_decode_worker()
            apart.wait_until_both_are_attached()
    wait_until_kv_moves_by_nixl(apart, service)
