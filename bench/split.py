"""Measures the split's tax: what three processes produce against the same engine in one."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

from grpc_load import output_tok_s
from load import Workload, run_load
from processes import OneProcess, Service


@dataclass(frozen=True, slots=True)
class Round:
    """Tokens per second, measured right after each other on the same requests."""

    one_process: float
    grpc: float
    """Three processes, read over gRPC."""
    http: float
    """Three processes, read over HTTP."""


@dataclass(frozen=True, slots=True)
class SplitTax:
    """Rounds at one concurrency."""

    concurrency: int
    rounds: tuple[Round, ...]

    @property
    def grpc_ratios(self) -> list[float]:
        """Of each round, ascending; 1 is no tax."""
        return sorted(each.grpc / each.one_process for each in self.rounds)

    @property
    def http_ratios(self) -> list[float]:
        """Of each round, ascending; 1 is no tax."""
        return sorted(each.http / each.one_process for each in self.rounds)

    def metrics(self) -> dict[str, float]:
        """As one flat object: names to numbers."""
        values = {
            "split_concurrency": self.concurrency,
            "split_one_process_tok_s": median(each.one_process for each in self.rounds),
            "split_grpc_tok_s": median(each.grpc for each in self.rounds),
            "split_http_tok_s": median(each.http for each in self.rounds),
        }
        for name, ratios in (
            ("split_ratio", self.grpc_ratios),
            ("split_ratio_http", self.http_ratios),
        ):
            values |= {
                name: median(ratios),
                f"{name}_min": ratios[0],
                f"{name}_max": ratios[-1],
            }
        return {name: round(value, 4) for name, value in values.items()}

    def table(self) -> str:
        """As text."""
        metrics = self.metrics()
        lines = [
            f"split tax at concurrency {self.concurrency}, median of {len(self.rounds)} rounds:",
            f"  one process               {metrics['split_one_process_tok_s']:>9,.1f} tok/s",
        ]
        for face, name, ratio in (
            ("gRPC", "split_grpc_tok_s", "split_ratio"),
            ("HTTP", "split_http_tok_s", "split_ratio_http"),
        ):
            lines.append(
                f"  three processes, by {face}  {metrics[name]:>9,.1f} tok/s"
                f"   ratio {metrics[ratio]:.3f}"
                f" ({metrics[ratio + '_min']:.3f} … {metrics[ratio + '_max']:.3f})"
            )
        return "\n".join(lines)


async def measure_split(
    service: Service,
    one_process: OneProcess,
    workload: Workload,
    concurrency: int,
    num_rounds: int,
    report: Callable[[str], None],
) -> SplitTax:
    """Take turns, so that what slows the machine for a while slows all of them.

    No two rounds have the same prompts: the prefix cache must not help.
    """
    rounds: list[Round] = []
    for index in range(num_rounds):
        report(f"split tax: round {index + 1} of {num_rounds} …")
        mine = replace(workload, seed=workload.seed + 1 + index)
        tok_s: dict[str, float] = {}
        for turn in range(3):
            match (index + turn) % 3:  # each round begins with another one
                case 0:
                    tok_s["one_process"] = await one_process.output_tok_s(mine, concurrency)
                case 1:
                    tok_s["grpc"] = await output_tok_s(service.grpc_target, mine, concurrency)
                case 2:
                    over_http = await run_load(service.base_url, mine, concurrency)
                    tok_s["http"] = over_http.output_tok_s
        rounds.append(Round(**tok_s))
    return SplitTax(concurrency, tuple(rounds))
