"""The report of a policy study: waiting times, and changes of the finish order."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from policy.study import Run, SeqName, SequenceHistory, Study

_WIDTH: Final = 18
_NUM_MOVERS: Final = 10


def describe_study(study: Study) -> Iterator[str]:
    """Yield the lines of the report."""
    config, times = study.config, study.step_times
    names = ("recorded", _name(config.policy, config.policy_args), study.policy)
    yield (
        f"worker {study.origin.worker_id}, recorded under "
        f"{_name(config.policy, config.policy_args)}; simulated under "
        f"{_name(study.policy, study.policy_args)}"
    )
    yield (
        f"a step is simulated to take {times.step_s * 1e3:.2f} ms + {times.token_s * 1e6:.2f} us "
        f"for each token, from {times.num_samples} recorded ones"
    )
    yield ""
    runs = (study.recorded, study.control, study.other)
    yield _row("", ("", "simulated", "simulated"))
    yield _row("", names)
    for label, value in _FIGURES:
        yield _row(label, tuple(map(value, runs)))
    yield ""
    yield from _describe_order(study)


def _name(policy: str, args: tuple[tuple[str, str], ...]) -> str:
    return " ".join([policy, *(f"{name}={value}" for name, value in args)])


def _row(label: str, values: tuple[str, ...]) -> str:
    return f"{label:<26}" + "".join(f"{value:>{_WIDTH}}" for value in values)


def _ends(run: Run) -> str:
    counts = Counter(seq.reason.name for seq in run.sequences.values() if seq.reason is not None)
    return " ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"


def _seconds(
    read: Callable[[SequenceHistory], float | None], take: Callable[[list[float]], float]
) -> Callable[[Run], str]:
    def describe(run: Run) -> str:
        values = [value for seq in run.sequences.values() if (value := read(seq)) is not None]
        return f"{take(values):.3f} s" if values else "-"

    return describe


def _quantile(percent: int) -> Callable[[list[float]], float]:
    def take(values: list[float]) -> float:
        # quantiles() needs at least two values
        return statistics.quantiles([*values, values[-1]], n=100, method="inclusive")[percent - 1]

    return take


_FIGURES: Final[tuple[tuple[str, Callable[[Run], str]], ...]] = (
    ("sequences", lambda run: str(len(run.sequences))),
    ("requests refused", lambda run: str(run.num_refused)),
    ("steps", lambda run: str(run.num_steps)),
    ("preemptions", lambda run: str(run.num_preemptions)),
    ("tokens computed again", lambda run: str(run.num_recomputed_tokens)),
    *(
        (f"{what}, {name}", _seconds(read, take))
        for what, read in (
            ("queue time", lambda seq: seq.queue_s),
            ("first token", lambda seq: seq.first_token_s),
            ("finished", lambda seq: seq.finished_s),
        )
        for name, take in (
            ("mean", statistics.fmean),
            ("median", _quantile(50)),
            ("99 %", _quantile(99)),
            ("most", max),
        )
    ),
)


def _describe_order(study: Study) -> Iterator[str]:
    """Describe how the finish order differs from the simulation of the recorded policy."""
    for name, run in (("recorded", study.recorded), ("recorded, simulated", study.control)):
        yield f"ended, {name}: {_ends(run)}"
    yield f"ended, {study.policy}: {_ends(study.other)}"
    before, after = _places(study.control), _places(study.other)
    common = before.keys() & after.keys()
    shifts = {name: after[name] - before[name] for name in common}
    moved = sorted(filter(shifts.get, shifts), key=lambda name: (-abs(shifts[name]), name))
    yield f"finish order: {len(moved)} of {len(common)} sequences change their place" + (
        "; the most:" if moved else ""
    )
    for mover in moved[:_NUM_MOVERS]:
        was, now = study.control.sequences[mover], study.other.sequences[mover]
        yield (
            f"  {was.request_id} output {was.output_index}: "
            f"place {before[mover]} to {after[mover]}, "
            f"finished {was.finished_s:.3f} s to {now.finished_s:.3f} s after it came"
        )


def _places(run: Run) -> dict[SeqName, int]:
    """Number the sequences in the order in which they ended, from 1."""
    ended = [
        (seq.arrived + seq.finished_s, name)
        for name, seq in run.sequences.items()
        if seq.finished_s is not None
    ]
    return {name: place for place, (_, name) in enumerate(sorted(ended), 1)}
