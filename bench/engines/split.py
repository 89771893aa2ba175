"""Measures the cost of the split: compares three processes with the same service in one."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Final

from harness.closed_loop import Turn, Workload, grpc_tok_s, run_load, take_turns
from harness.processes import Service
from harness.turns import Spread

ONE_GRPC: Final = "one_grpc"
ONE_HTTP: Final = "one_http"
GRPC: Final = "grpc"
HTTP: Final = "http"

_TITLES: Final = {
    ONE_GRPC: "one process, by gRPC",
    ONE_HTTP: "one process, by HTTP",
    GRPC: "three processes, by gRPC",
    HTTP: "three processes, by HTTP",
}
_RATIOS: Final = {
    "split_ratio": ("three ÷ one, by gRPC", GRPC, ONE_GRPC),
    "split_ratio_http": ("three ÷ one, by HTTP", HTTP, ONE_HTTP),
}
_WARM_UP_LEN: Final = 8


@dataclass(frozen=True, slots=True)
class SplitTax:
    """The tokens per second of all rounds at one concurrency."""

    concurrency: int
    tok_s: Mapping[str, list[float]]
    """Each side's tokens per second, round by round, on the same requests."""

    def ratios(self) -> dict[str, Spread]:
        """Return the ratios of the sides that were measured; at 1 the split costs nothing."""
        return {
            name: Spread.of_ratios(self.tok_s[above], self.tok_s[below])
            for name, (_, above, below) in _RATIOS.items()
            if {above, below} <= self.tok_s.keys()
        }

    def metrics(self) -> dict[str, float]:
        values: dict[str, float] = {"split_concurrency": self.concurrency}
        values |= {f"split_{side}_tok_s": median(each) for side, each in self.tok_s.items()}
        for name, spread in self.ratios().items():
            values |= spread.metrics(name)
        return values

    def table(self) -> str:
        num_rounds = len(next(iter(self.tok_s.values())))
        lines = [f"split tax at concurrency {self.concurrency}, median of {num_rounds} rounds:"]
        lines += [
            f"  {title:<28}{median(self.tok_s[side]):>9,.1f} tok/s"
            for side, title in _TITLES.items()
            if side in self.tok_s
        ]
        lines += [f"  {_RATIOS[name][0]:<28}    {spread}" for name, spread in self.ratios().items()]
        return "\n".join(lines)


def by_grpc(service: Service) -> Turn[float]:
    return partial(grpc_tok_s, service.grpc_target)


def by_http(service: Service) -> Turn[float]:
    async def turn(workload: Workload, concurrency: int) -> float:
        return (await run_load(service.base_url, workload, concurrency)).output_tok_s

    return turn


async def measure_split(
    sides: Mapping[str, Turn[float]], workload: Workload, concurrency: int, num_rounds: int
) -> SplitTax:
    """Measure all sides in turn, after a short warm-up of each."""
    warm_up = replace(workload, num_prompts=concurrency, output_len=_WARM_UP_LEN, seed=-1)
    for turn in sides.values():
        await turn(warm_up, concurrency)
    return SplitTax(concurrency, await take_turns(sides, workload, concurrency, num_rounds))
