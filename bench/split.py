"""Measures the split's tax: what three processes produce against the same service in one.

Beside it, what the engine produces with no service around it: no router, no face, no text, and no
client, which takes its part of the same machine.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Final, TypeAlias

from grpc_load import output_tok_s
from load import Workload, run_load
from processes import Service
from ratios import ratio_metrics, ratio_text

Turn: TypeAlias = Callable[[Workload, int], Awaitable[float]]
"""Completes a workload at a concurrency; gives tokens per second."""

ENGINE: Final = "engine"
ONE_GRPC: Final = "one_grpc"
ONE_HTTP: Final = "one_http"
GRPC: Final = "grpc"
HTTP: Final = "http"

_TURN_TO_TITLE: Final = {
    ENGINE: "the engine alone",
    ONE_GRPC: "one process, by gRPC",
    ONE_HTTP: "one process, by HTTP",
    GRPC: "three processes, by gRPC",
    HTTP: "three processes, by HTTP",
}
_RATIOS: Final = {
    "split_ratio": ("three ÷ one, by gRPC", GRPC, ONE_GRPC),
    "split_ratio_http": ("three ÷ one, by HTTP", HTTP, ONE_HTTP),
    "engine_ratio": ("three, by gRPC ÷ the engine", GRPC, ENGINE),
}
_WARM_UP_LEN: Final = 8
_WARM_UP_SEED: Final = -1


@dataclass(frozen=True, slots=True)
class SplitTax:
    """Rounds at one concurrency."""

    concurrency: int
    rounds: tuple[Mapping[str, float], ...]
    """Tokens per second by turn, measured right after each other on the same requests."""

    def ratios(self) -> dict[str, list[float]]:
        """Of each round, ascending, by name, of which both sides were measured; 1 is no tax."""
        return {
            name: sorted(each[above] / each[below] for each in self.rounds)
            for name, (_, above, below) in _RATIOS.items()
            if {above, below} <= self.rounds[0].keys()
        }

    def metrics(self) -> dict[str, float]:
        """As one flat object: names to numbers."""
        values: dict[str, float] = {"split_concurrency": self.concurrency}
        for turn in self.rounds[0]:
            values[f"split_{turn}_tok_s"] = median(each[turn] for each in self.rounds)
        values |= ratio_metrics(self.ratios())
        return {name: round(value, 4) for name, value in values.items()}

    def table(self) -> str:
        """As text."""
        metrics = self.metrics()
        lines = [
            f"split tax at concurrency {self.concurrency}, median of {len(self.rounds)} rounds:"
        ]
        for turn, title in _TURN_TO_TITLE.items():
            if turn in self.rounds[0]:
                lines.append(f"  {title:<28}{metrics[f'split_{turn}_tok_s']:>9,.1f} tok/s")
        for name, ratios in self.ratios().items():
            title, *_ = _RATIOS[name]
            lines.append(f"  {title:<28}    {ratio_text(ratios)}")
        return "\n".join(lines)


def by_grpc(service: Service) -> Turn:
    """Read a service over gRPC."""
    return partial(output_tok_s, service.grpc_target)


def by_http(service: Service) -> Turn:
    """Read a service over HTTP."""

    async def turn(workload: Workload, concurrency: int) -> float:
        return (await run_load(service.base_url, workload, concurrency)).output_tok_s

    return turn


async def measure_split(
    turns: Mapping[str, Turn],
    workload: Workload,
    concurrency: int,
    num_rounds: int,
    report: Callable[[str], None],
) -> SplitTax:
    """Take turns, so that what slows the machine for a while slows all of them.

    Every other round has the turns in reverse. No two rounds have the same prompts: the prefix
    cache must not help. Before the first, each has a short turn that does not count.
    """
    warm_up = replace(
        workload, num_prompts=concurrency, output_len=_WARM_UP_LEN, seed=_WARM_UP_SEED
    )
    for turn in turns.values():
        await turn(warm_up, concurrency)
    names = list(turns)
    rounds: list[Mapping[str, float]] = []
    for index in range(num_rounds):
        report(f"split tax: round {index + 1} of {num_rounds} …")
        mine = replace(workload, seed=workload.seed + 1 + index)
        rounds.append({name: await turns[name](mine, concurrency) for name in names})
        names.reverse()
    return SplitTax(concurrency, tuple(rounds))
