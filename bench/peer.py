"""Loads a server, and another of the same model that takes turns with it, round after round.

What slows a machine for a while slows both sides of a round, so a ratio is taken within a round;
what is told is the median of the rounds. Every other round has the sides in reverse, and no two
rounds have the same prompts: a prefix cache must not help.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Final

from load import LoadResult, Workload, find_model, format_table, metrics_of, run_load
from ratios import ratio_metrics, ratio_text

_RATIOS: Final = {
    "peer_ratio": "output_tok_s",
    "peer_ttft_ratio": "ttft_mean_ms",
    "peer_itl_p99_ratio": "itl_p99_ms",
}
"""What is compared: names to fields of LoadResult."""
_FIRST_SEED: Final = 10_000
"""Far from those of others who load the same servers."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """What was measured at one concurrency, a result a round."""

    ours: tuple[LoadResult, ...]
    peers: tuple[LoadResult, ...]
    """Of the same rounds; empty if there is no peer."""

    def ratios(self) -> dict[str, list[float]]:
        """Ours ÷ the peer's, by name, ascending; empty if there is no peer."""
        if not self.peers:
            return {}
        suffix = f"c{self.ours[0].concurrency}"
        return {
            f"{name}_{suffix}": sorted(
                getattr(ours, field) / getattr(peers, field)
                for ours, peers in zip(self.ours, self.peers, strict=True)
            )
            for name, field in _RATIOS.items()
        }


@dataclass(frozen=True, slots=True)
class Loads:
    """What was measured at each concurrency."""

    rounds: tuple[Rounds, ...]

    @property
    def ours(self) -> list[LoadResult]:
        """The medians of our rounds, number by number."""
        return [_median_of(each.ours) for each in self.rounds]

    def metrics(self) -> dict[str, float]:
        """As one flat object: names to numbers."""
        values = metrics_of(self.ours)
        for each in self.rounds:
            values |= ratio_metrics(each.ratios())
        return {name: round(value, 4) for name, value in values.items()}

    def table(self) -> str:
        """As text."""
        num_rounds = len(self.rounds[0].ours)
        lines = [f"medians of {num_rounds} rounds:", format_table(self.ours)]
        if self.rounds[0].peers:
            lines += ["the peer:", format_table([_median_of(each.peers) for each in self.rounds])]
            lines.append("ours ÷ the peer's:")
        for each in self.rounds:
            lines += [
                f"  {name:<24} {ratio_text(ratios)}" for name, ratios in each.ratios().items()
            ]
        return "\n".join(lines)


async def measure_loads(
    base_url: str,
    peer_url: str | None,
    workloads: Sequence[tuple[int, Workload]],
    num_rounds: int,
    report: Callable[[str], None],
) -> Loads:
    """Run each workload at its concurrency, `num_rounds` times; `peer_url` is None without one."""
    sides = {url: await find_model(url) for url in (base_url, peer_url) if url is not None}
    loads: list[Rounds] = []
    for concurrency, workload in workloads:
        results: dict[str, list[LoadResult]] = {url: [] for url in sides}
        for index in range(num_rounds):
            report(f"concurrency {concurrency}: round {index + 1} of {num_rounds} …")
            mine = replace(workload, seed=_FIRST_SEED + index)
            for url in reversed(sides) if index % 2 else sides:
                result = await run_load(url, replace(mine, model=sides[url]), concurrency)
                results[url].append(result)
        peers = () if peer_url is None else tuple(results[peer_url])
        loads.append(Rounds(tuple(results[base_url]), peers))
    return Loads(tuple(loads))


def _median_of(results: Sequence[LoadResult]) -> LoadResult:
    """The median of each number that varies."""
    numbers = {
        each.name: median(getattr(result, each.name) for result in results)
        for each in fields(LoadResult)
        if each.type is float
    }
    return replace(results[0], **numbers)
