"""Do the tests of the block space see a fault? `python -m tests.mutation --mutants 200 --seed 0`.

Draws faults in `scheduler_svc/core`, one at a time, and runs the core's tests on each. Prints each
that survives; ends with 1 if the tests see fewer than `--goal` percent.
"""

import argparse
import random
import tempfile
import tomllib
from collections import Counter
from pathlib import Path

from tests.mutation.mutants import Mutant, mutants_of
from tests.mutation.trial import Trial, Verdict

ROOT = Path(__file__).parents[2]
CORE = Path("scheduler_svc/core")
NOT_BLOCK_SPACE = {"acceptance", "accounts", "config", "errors", "invariants", "rates", "request"}
"""What the core is told and tells, what it is tested with, and what it counts for others."""
FOLDERS = ("scheduler_svc", "quire", "rpc", "tests")
TESTS = (
    "tests/unit/scheduler_svc/core",
    "tests/property/test_histories.py",
    "tests/property/test_scheduler.py",
)


def candidates(names: list[str]) -> list[Mutant]:
    """Return all mutants of the named files, or of all, but those known to be no faults.

    Raises:
        ValueError: A mutant is listed as no fault and does not exist (any more).
    """
    listed = tomllib.loads((Path(__file__).parent / "equivalent.toml").read_text())
    equivalent = {(m["file"], m["old"], m["new"]) for m in listed.get("mutant", [])}
    found, mutants = set(), []
    for file in sorted((ROOT / CORE).glob("*.py")):
        if file.stem in NOT_BLOCK_SPACE or (names and file.stem not in names):
            continue
        for mutant in mutants_of(CORE / file.name, file.read_text()):
            key = (file.name, mutant.removed, mutant.added)
            if key in equivalent:
                found.add(key)
            else:
                mutants.append(mutant)
    stale = {key for key in equivalent - found if not names or Path(key[0]).stem in names}
    if stale:
        raise ValueError(f"equivalent.toml lists mutants that do not exist: {sorted(stale)}")
    return mutants


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("files", nargs="*", help="such as block_pool; all if none is given")
    parser.add_argument("--mutants", type=int, default=200, help="how many to draw")
    parser.add_argument("--seed", type=int, default=0, help="of the drawing")
    parser.add_argument("--goal", type=float, default=95.0, help="percent that must not survive")
    options = parser.parse_args()
    mutants = candidates(options.files)
    drawn = random.Random(options.seed).sample(mutants, min(options.mutants, len(mutants)))
    verdicts: Counter[Verdict] = Counter()
    with tempfile.TemporaryDirectory() as copy:
        trial = Trial.of_tree(ROOT, FOLDERS, Path(copy), TESTS)
        print(f"{len(drawn)} of {len(mutants)} mutants; without any, the tests take", end=" ")
        print(f"{trial.prove():.0f} s", flush=True)
        for mutant in drawn:
            verdict = trial.judge(mutant)
            verdicts[verdict] += 1
            if verdict is Verdict.SURVIVED:
                print(f"\nsurvived:\n{mutant.diff()}", flush=True)
    share = 100 * (1 - verdicts[Verdict.SURVIVED] / verdicts.total())
    counts = ", ".join(f"{verdicts[verdict]} {verdict.value}" for verdict in Verdict)
    print(f"\n{counts}: {share:.1f} % seen (goal {options.goal:g} %)")
    return 0 if share >= options.goal else 1


if __name__ == "__main__":
    raise SystemExit(main())
