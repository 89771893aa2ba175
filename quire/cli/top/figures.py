"""The figures of `quire top`: snapshots of a service, and rates between two snapshots."""

import contextlib
import ssl
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from contract.errors import PermissionDeniedError
from quire.cli.up.service_dir import ServiceInfo
from quire.client import Client
from quire.client.types import Load
from quire.v1.common_pb2 import WorkerActivity
from quire.v1.kv_pb2 import KV_TIER_DEVICE, KvTier, SequenceKv, TierKv, WorkerKv

_TIMEOUT_S: Final = 3.0
_HTTP_TIMEOUT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class RouterFigures:
    """Counters of the router since its start."""

    code_to_num_refused: Mapping[str, int]
    """Number of refused requests by gRPC status."""
    first_token_s: float
    """The sum of the times to the first token, of `num_first_tokens` requests."""
    num_first_tokens: int
    between_tokens_s: float
    num_between_tokens: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a service at one moment."""

    taken_at_s: float
    """The time on the monotonic clock."""
    load: Load
    kv: tuple[WorkerKv, ...] = ()
    """The KV of each worker, without the state of each block."""
    activity: tuple[WorkerActivity, ...] = ()
    router: RouterFigures | None = None
    """None: the router's HTTP address is unknown, or the router does not answer there."""
    note: str = ""
    """Why figures are missing."""


@dataclass(frozen=True, slots=True)
class StepRates:
    """The rates of one worker's activity between two snapshots, per second."""

    steps: float
    prefill_tokens: float
    decode_tokens: float
    busy: float
    """Share of time spent on steps; above 1 if steps overlap."""
    preemptions: float


@dataclass(frozen=True, slots=True)
class TierSum:
    """The blocks of one tier, summed over all workers."""

    tier: int
    """A `KvTier`."""
    num_blocks: int
    num_shared: int
    num_held: int
    num_pinned: int
    num_cached: int
    num_free: int
    num_bytes: int


def take_snapshot(client: Client, service: ServiceInfo | None, max_sequences: int) -> Snapshot:
    """Query the router and, if `service` is given, read the router's metrics.

    Raises:
        QuireError: The router does not answer, or refuses the query.
    """
    now = time.monotonic()
    load = client.load(timeout_s=_TIMEOUT_S)
    router = None if service is None else _read_router(service)
    try:
        kv = client.describe_kv(max_sequences=max_sequences, max_blocks=0, timeout_s=_TIMEOUT_S)
        activity = client.describe_activity(timeout_s=_TIMEOUT_S)
    except PermissionDeniedError as error:  # a tenant's key may only read the load
        return Snapshot(now, load, router=router, note=str(error))
    return Snapshot(now, load, kv, activity, router)


def rates_between(before: Snapshot, after: Snapshot) -> Mapping[str, StepRates]:
    """Return the rates of the workers that stayed attached between the snapshots."""
    took_s = after.taken_at_s - before.taken_at_s
    name_to_before = {it.worker: it for it in before.activity}
    rates = {}
    for it in after.activity:
        was = name_to_before.get(it.worker)
        if was is None or was.attached_at_s != it.attached_at_s or took_s <= 0:
            continue
        rates[it.worker] = StepRates(
            steps=(it.num_steps - was.num_steps) / took_s,
            prefill_tokens=(it.num_prefill_tokens - was.num_prefill_tokens) / took_s,
            decode_tokens=(it.num_decode_tokens - was.num_decode_tokens) / took_s,
            busy=(it.busy_s - was.busy_s) / took_s,
            preemptions=(it.num_preemptions - was.num_preemptions) / took_s,
        )
    return rates


def sum_tiers(workers: Sequence[WorkerKv]) -> tuple[TierSum, ...]:
    """Return each tier's blocks, summed over all workers; the fastest tier comes first."""

    def sum_of(tier: int) -> TierSum:
        tiers = [(worker, it) for worker in workers for it in worker.tiers if it.tier == tier]

        def total(name: str) -> int:
            return sum(getattr(it, name) for _, it in tiers)

        return TierSum(
            tier=tier,
            num_blocks=total("num_blocks"),
            num_shared=total("num_shared"),
            num_held=total("num_held"),
            num_pinned=total("num_pinned"),
            num_cached=total("num_cached"),
            num_free=total("num_free"),
            num_bytes=sum(it.num_blocks * worker.block_bytes for worker, it in tiers),
        )

    return tuple(it for it in map(sum_of, KvTier.values()) if it.num_blocks)


def device_of(worker: WorkerKv) -> TierKv:
    """Return the worker's device tier; every worker has one."""
    return next(tier for tier in worker.tiers if tier.tier == KV_TIER_DEVICE)


def largest_sequences(workers: Sequence[WorkerKv]) -> tuple[tuple[str, SequenceKv], ...]:
    """Return (worker, sequence) pairs, the sequence with the most blocks first."""
    pairs = [(worker.worker, seq) for worker in workers for seq in worker.sequences]

    def size(pair: tuple[str, SequenceKv]) -> tuple[int, int]:
        seq = pair[1]
        return -seq.num_device_blocks - seq.num_host_blocks - seq.num_disk_blocks, seq.seq_id

    return tuple(sorted(pairs, key=size))


def parse_metrics(text: str) -> RouterFigures:
    """Parse a router's /metrics."""
    refused: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "quire_requests_refused_total":
                refused[sample.labels["code"]] += int(sample.value)
            elif sample.name.endswith(("_sum", "_count")):
                sums[sample.name] += sample.value  # type: ignore[assignment]
    return RouterFigures(
        code_to_num_refused={code: num for code, num in sorted(refused.items()) if num},
        first_token_s=sums["quire_time_to_first_token_seconds_sum"],
        num_first_tokens=int(sums["quire_time_to_first_token_seconds_count"]),
        between_tokens_s=sums["quire_inter_token_latency_seconds_sum"],
        num_between_tokens=int(sums["quire_inter_token_latency_seconds_count"]),
    )


def _read_router(service: ServiceInfo) -> RouterFigures | None:
    # Do not check the certificate, since nothing secret is sent.
    tls = ssl._create_unverified_context() if service.has_tls else None  # noqa: S323, SLF001
    url = f"{'https' if service.has_tls else 'http'}://{service.http_address}/metrics"
    with contextlib.suppress(OSError, ValueError):
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls)
        )
        with opener.open(url, timeout=_HTTP_TIMEOUT_S) as response:
            return parse_metrics(response.read().decode())
    return None
