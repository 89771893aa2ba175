"""Long fuzzing: `python -m tests.fuzz --minutes 10`; each target gets its share of the time.

Prints how many cases each target ran. A failing case is shrunk, printed and kept in
tests/fuzz/corpus; then the process exits with 1, after the other targets.
"""

import argparse
import logging
import random
import sys
import time
import traceback

import structlog

from tests.fuzz import live_router, live_scheduler, live_worker, outputs, parsers
from tests.fuzz.fuzzing import long_pass, write_case

TARGETS = {
    target.name: target
    for module in (parsers, outputs, live_router, live_scheduler, live_worker)
    for target in module.TARGETS
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help=f"all without it: {', '.join(TARGETS)}")
    parser.add_argument("--minutes", type=float, default=10, help="in all")
    parser.add_argument("--seed", type=int, default=random.getrandbits(32), help="of the drawing")
    options = parser.parse_args()
    if unknown := set(options.targets) - set(TARGETS):
        parser.error(f"unknown target {', '.join(sorted(unknown))}; known: {', '.join(TARGETS)}")
    names = options.targets or list(TARGETS)
    # refusals are logged, and nearly all cases are refused
    logging.disable()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    print(f"seed {options.seed}", flush=True)
    num_found = 0
    for name in names:
        until = time.monotonic() + 60 * options.minutes / len(names)
        num_cases, found = long_pass(TARGETS[name], until, options.seed)
        print(f"{name:20} {num_cases:9,} cases", "" if found is None else "FOUND", flush=True)
        if found is not None:
            num_found += 1
            traceback.print_exception(found.error)
            path = write_case(TARGETS[name], found.case, str(found.error)[:300])
            print(f"kept as {path}", flush=True)
    return 1 if num_found else 0


if __name__ == "__main__":
    sys.exit(main())
