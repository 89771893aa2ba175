"""Gauges of a whole cell in a router's `/metrics`, for gateways that choose among cells.

The model server protocol of the Gateway API Inference Extension asks for these gauges. Each gauge
has two names, Quire's and vLLM's, so a gateway that knows vLLM's names needs no configuration.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from contract.errors import QuireError
from quire.v1.common_pb2 import Load
from router.request.cells import Cells
from router.request.inference import Inference

_FRESH_S: Final = 0.05
"""How long scrapes show a load before the router asks the schedulers again. A gateway scrapes up to
20 times per second."""
_TIMEOUT_S: Final = 1.0
"""How long a scrape waits for a model's schedulers; after that, the model's gauges are missing."""

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
    """Exports each model's load, summed over its schedulers, as of the last `refresh`."""

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self._loads: Sequence[Load | None] = [None] * len(cells.all)
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()

    async def refresh(self) -> None:
        """Ask the schedulers for their load, unless the last answer is younger than `_FRESH_S`."""
        async with self._reading:
            clock = asyncio.get_running_loop().time
            if clock() < self._read_at + _FRESH_S:
                return
            self._loads = await asyncio.gather(*map(_load_of, self._cells.all))
            self._read_at = clock()

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registration does not call `collect` to learn gauges' names."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Return the gauges; the load of a model whose schedulers have not answered is absent."""
        name_to_load = [
            (cell.model.name, load)
            for cell, load in zip(self._cells.all, self._loads, strict=True)
            if load is not None
        ]
        for names in _NAMES:
            for name, text, read in _GAUGES:
                family = GaugeMetricFamily(names.format(name), text, labels=["model_name"])
                for model_name, load in name_to_load:
                    family.add_metric([model_name], read(load))
                yield family
            yield _cache_config(names, name_to_load)
            yield self._lora(names)

    def _lora(self, names: str) -> Metric:
        family = GaugeMetricFamily(
            names.format("lora_requests_info"),
            "Unix time of the scrape, in seconds. The labels list the LoRA adapters of this"
            " router's running and waiting requests, and say how many adapters are loaded. Absent"
            " if no adapter is loaded.",
            labels=["model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        for cell in self._cells.all:
            if num_loaded := sum(model.adapter is not None for model in cell.model.infos()):
                running, waiting = self._adapters_in_use(cell)
                labels = [str(num_loaded), ",".join(running), ",".join(waiting)]
                family.add_metric([cell.model.name, *labels], time.time())
        return family

    def _adapters_in_use(self, cell: Inference) -> tuple[Sequence[str], Sequence[str]]:
        running, waiting = set[str](), set[str]()
        for live in (each.live for each in self._cells.admitted if each.model == cell.name):
            if live is not None and (adapter := live.record.sampling.adapter) is not None:
                (waiting if live.num_cached_tokens is None else running).add(adapter.name)
        return sorted(running), sorted(waiting - running)


async def _load_of(cell: Inference) -> Load | None:
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return await cell.schedulers.load()
    except (QuireError, TimeoutError):
        return None


def _cache_config(names: str, name_to_load: Iterable[tuple[str, Load]]) -> Metric:
    family = GaugeMetricFamily(
        names.format("cache_config_info"),
        "Always 1. The labels say how many token slots a block has, and how many device blocks the"
        " cell has.",
        labels=["model_name", "block_size", "num_gpu_blocks"],
    )
    for model_name, load in name_to_load:
        if load.num_blocks:
            family.add_metric([model_name, str(load.block_size), str(load.num_blocks)], 1)
    return family
