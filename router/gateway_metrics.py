"""Gauges of the whole cell on the router's own port, for gateways that choose among cells.

They are what the Gateway API Inference Extension's model server protocol asks for, each under two
names: Quire's and vLLM's, so that an endpoint picker that knows vLLM needs no configuration.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from contract.errors import QuireError
from quire.v1.common_pb2 import Load
from router.request.inference import Inference

_FRESH_S: Final = 0.05
"""How long a load is used: gateways scrape up to 20 times per second, each on its own."""
_TIMEOUT_S: Final = 1.0
"""Longest wait of a scrape for the schedulers; then there are no gauges of the cell."""

_NAMES: Final = ("quire_cell_{}", "vllm:{}")


def _usage(load: Load) -> float:
    num_available = load.num_free_blocks + load.num_cached_blocks
    return 1 - num_available / load.num_blocks if load.num_blocks else 0.0


_GAUGES: Final[tuple[tuple[str, str, Callable[[Load], float]], ...]] = (
    (
        "num_requests_waiting",
        "Sequences of all routers that wait for admission.",
        lambda load: load.num_requests_waiting,
    ),
    (
        "num_requests_running",
        "Running sequences of all routers.",
        lambda load: load.num_requests_running,
    ),
    (
        "kv_cache_usage_perc",
        "Share of the cell's device blocks that sequences hold, in [0, 1].",
        _usage,
    ),
)


class GatewayMetrics(Collector):
    """The load of this router's schedulers together, as of the last `refresh`."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference
        self._load: Load | None = None
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()

    async def refresh(self) -> None:
        """Ask the schedulers for their load, unless the last answer is fresh."""
        async with self._reading:
            clock = asyncio.get_running_loop().time
            if clock() < self._read_at + _FRESH_S:
                return
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    self._load = await self._inference.load()
            except (QuireError, TimeoutError):
                self._load = None
            self._read_at = clock()

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that the registry does not read the names before the start."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Return the gauges; those of a cell without a scheduler have no samples."""
        load, model_name = self._load, self._inference.model.name
        for names in _NAMES:
            for name, text, read in _GAUGES:
                family = GaugeMetricFamily(names.format(name), text, labels=["model_name"])
                if load is not None:
                    family.add_metric([model_name], read(load))
                yield family
            yield _cache_config(names, load)
            yield self._lora(names)

    def _lora(self, names: str) -> Metric:
        family = GaugeMetricFamily(
            names.format("lora_requests_info"),
            "When it was read, in seconds since 1970; the labels list the LoRA adapters of this"
            " router's running and waiting requests, and how many adapters are loaded. Absent"
            " without an adapter.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        loaded = [model for model in self._inference.model.infos() if model.adapter is not None]
        if loaded:
            running, waiting = self._adapters_in_use()
            labels = [str(len(loaded)), ",".join(running), ",".join(waiting)]
            family.add_metric(labels, time.time())
        return family

    def _adapters_in_use(self) -> tuple[Sequence[str], Sequence[str]]:
        running, waiting = set[str](), set[str]()
        for live in (each.live for each in self._inference.admitted):
            if live is not None and (adapter := live.record.sampling.adapter) is not None:
                (waiting if live.num_cached_tokens is None else running).add(adapter.name)
        return sorted(running), sorted(waiting - running)


def _cache_config(names: str, load: Load | None) -> Metric:
    family = GaugeMetricFamily(
        names.format("cache_config_info"),
        "1; the labels are the token slots of a block, and how many device blocks the cell has.",
        labels=["block_size", "num_gpu_blocks"],
    )
    if load is not None and load.num_blocks:
        family.add_metric([str(load.block_size), str(load.num_blocks)], 1)
    return family
