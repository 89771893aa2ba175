"""Mutation testing of the block space: `python -m tests.mutation --mutants 400 --seed 0`.

Makes faults in `scheduler_svc/core` and `contract/hashing.py`, one at a time, and runs the core's
tests on each. Prints each survivor; exits with 1 if the tests detect fewer than `--goal` percent.
"""

import argparse
import os
import random
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.mutation.mutants import Mutant, mutants_of
from tests.mutation.trial import Verdict, try_mutants

ROOT = Path(__file__).parents[2]
NOT_BLOCK_SPACE = {"limits", "config", "errors", "invariants", "pacing", "request"}
"""Modules that are not mutated: inputs and outputs of the core, its checks, and reports."""
# not other conftests, because they start services that the core does not need
ONE_CONFTEST = ("--noconftest", "-p", "tests.conftest")
TESTS = (
    "tests/unit/scheduler_svc/core",
    "tests/property/test_histories.py",
    "tests/property/test_scheduler.py",
)


def all_mutants(names: Sequence[str] = ()) -> list[Mutant]:
    """Return all mutants of the named files and functions, or of all files."""
    core = ROOT / "scheduler_svc" / "core"
    files = [ROOT / "contract" / "hashing.py", *sorted(core.rglob("*.py"))]
    return [
        mutant
        for file in files
        if core / "policies" not in file.parents
        for mutant in mutants_of(file.relative_to(ROOT), file.read_text())
        if (
            not {file.stem, f"{file.stem}.{mutant.function}"}.isdisjoint(names)
            if names
            else file.stem not in NOT_BLOCK_SPACE
        )
    ]


def equivalent_keys() -> set[tuple[str, str, str]]:
    """Return the keys of the mutants in equivalent.toml, which are no faults."""
    listed = tomllib.loads((Path(__file__).parent / "equivalent.toml").read_text())
    return {(m["at"], m["old"], m["new"]) for m in listed["mutant"]}


def candidates(names: Sequence[str] = ()) -> list[Mutant]:
    """Return all mutants of the named files and functions, or of all files, except known
    equivalent ones."""
    equivalent = equivalent_keys()
    return [mutant for mutant in all_mutants(names) if key(mutant) not in equivalent]


def key(mutant: Mutant) -> tuple[str, str, str]:
    """How equivalent.toml names a mutant."""
    at = f"{mutant.path.name} {mutant.function}".strip()
    return at, mutant.removed, mutant.added


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("names", nargs="*", help="such as blocks, or pins.restore; all without it")
    parser.add_argument("--mutants", type=int, help="how many to draw; all without it")
    parser.add_argument("--seed", type=int, default=0, help="seed of the drawing")
    parser.add_argument(
        "--tests", nargs="+", default=TESTS, help="run only these, to write new ones"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="trials at a time")
    parser.add_argument("--goal", type=float, default=95.0, help="percent that must not survive")
    options = parser.parse_args()
    if not (mutants := candidates(options.names)):
        parser.error(f"there is nothing to change in {', '.join(options.names)}")
    num_drawn = min(options.mutants or len(mutants), len(mutants))
    drawn = random.Random(options.seed).sample(mutants, num_drawn)
    verdicts: Counter[Verdict] = Counter()

    def report(mutant: Mutant, verdict: Verdict) -> None:
        verdicts[verdict] += 1
        survived = verdict is Verdict.SURVIVED
        print(f"\n\nsurvived:\n{mutant.diff()}\n" if survived else ".", end="", flush=True)

    tests = (*ONE_CONFTEST, *options.tests)
    print(f"{num_drawn} of {len(mutants)} mutants, after the tests without any", flush=True)
    if exit_code := try_mutants(ROOT, drawn, tests, options.jobs, report):
        return exit_code
    share = 100 * (1 - verdicts[Verdict.SURVIVED] / num_drawn)
    counts = ", ".join(f"{verdicts[verdict]} {verdict.value}" for verdict in Verdict)
    print(f"\n\n{counts}: {share:.1f} % seen (goal {options.goal:g} %)")
    return 0 if share >= options.goal else 1


if __name__ == "__main__":
    raise SystemExit(main())
