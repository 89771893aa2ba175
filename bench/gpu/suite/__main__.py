"""Runs a call of the GPU tests and benchmarks, and prints one table: see gpu.sh.

Every part is a separate process with a share of the call's time. A part that takes longer is
stopped, so that later parts get their shares; results that it has written until then count. If a
part fails or has no time left, its line in the table says so. --cpu-smoke runs every part with the
smallest shapes on a CPU: it measures nothing, and shows that the scripts work.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from gpu.suite.outputs import pack, read_results
from gpu.suite.parts import BENCH, CEILINGS, KEPT, MOST_S, ROOT, Part, ceilings, smoke, whole
from gpu.suite.report import Outcome, table, write

_LOG_LINES: Final = 12
_LEAST_S: Final = 5.0
"""With less time than this, a part is not started."""
_STOP_S: Final = 10.0
"""How long a part may take to end its own processes, and to write its results."""
_TRITON_CACHE: Final = KEPT / "triton"


class Running(Protocol):
    """A part's process."""

    def wait(self, timeout_s: float) -> int | None:
        """Return the process's exit status, or None if it still runs after `timeout_s`."""

    def stop(self) -> None:
        """End the process and its children."""


Start = Callable[[Part, Path], Running]
"""Starts a part in a directory, and writes its output to log.txt there; may raise OSError."""


class _Process:
    def __init__(self, part: Part, directory: Path) -> None:
        paths = (str(BENCH), str(ROOT), os.environ.get("PYTHONPATH"))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONUNBUFFERED": "1",
            "TRITON_CACHE_DIR": str(_TRITON_CACHE),
            **part.environment,
        }
        with (directory / "log.txt").open("wb") as log:
            self._process = subprocess.Popen(
                [word.replace("{out}", str(directory)) for word in part.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
            )

    def wait(self, timeout_s: float) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def stop(self) -> None:
        """Interrupt the part, so that pytest writes its results; then kill the whole session."""
        with contextlib.suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.kill(self._process.pid, signal.SIGINT)
                self.wait(_STOP_S)
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def run(part: Part, work: Path, limit_s: float, now: Callable[[], float], start: Start) -> Outcome:
    """Run a part in its own directory of `work`; failures are recorded in the outcome."""
    directory = _directory(part, work)
    directory.mkdir(parents=True, exist_ok=True)
    started = now()
    errors: list[str] = []
    process: Running | None = None
    try:
        process = start(part, directory)
        code = process.wait(limit_s)
        if code is None:
            errors.append(f"took longer than {limit_s:.0f} s")
        elif code:
            errors.append(f"ended with {code}: {_tail(directory)}")
    except OSError as error:
        errors.append(str(error))
    finally:
        if process is not None:
            process.stop()
    return _outcome(part, work, now() - started, errors)


def _directory(part: Part, work: Path) -> Path:
    return work / part.name.replace(" ", "-")


def _outcome(part: Part, work: Path, seconds: float, errors: list[str]) -> Outcome:
    """Return the outcome of a part that has ended, with the results that it has written."""
    directory = _directory(part, work)
    results = read_results(directory, errors) or {"summary": [_tail(directory, 1)]}
    return Outcome(part.name, seconds, " | ".join(errors) or None, results)


def _tail(directory: Path, num_lines: int = _LOG_LINES) -> str:
    log = directory / "log.txt"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(lines[-num_lines:])


def run_all(
    parts: tuple[Part, ...],
    outcomes: list[Outcome],
    work: Path,
    out: Path,
    budget_s: float,
    now: Callable[[], float] = time.monotonic,
    start: Start = _Process,
) -> None:
    """Run the parts in order while there is time; add each to `outcomes`, and write gpu.json.

    A part may take its own seconds, and those that no later part needs. If the call is interrupted,
    the results written so far count, too; KeyboardInterrupt is raised again.
    """
    ends_s = now() + budget_s
    for index, part in enumerate(parts):
        left_s = ends_s - now()
        later_s = sum(other.seconds for other in parts[index + 1 :])
        limit_s = min(left_s, max(part.seconds, left_s - later_s)) - _STOP_S
        started = now()
        try:
            if limit_s < _LEAST_S:
                outcomes.append(Outcome(part.name, 0.0, "no time was left", {}))
            else:
                print(f"{part.name}: up to {limit_s:.0f} s …", file=sys.stderr, flush=True)
                outcomes.append(run(part, work, limit_s, now, start))
        except KeyboardInterrupt:
            outcomes.append(_outcome(part, work, now() - started, ["interrupted"]))
            raise
        finally:
            write(outcomes, out)


def plan_text(parts: tuple[Part, ...], budget_s: float) -> str:
    """Return the plan: the seconds of each part."""
    lines = [f"  {part.name:<20} {part.seconds:4.0f} s" for part in parts]
    total_s = sum(part.seconds for part in parts)
    return "\n".join([*lines, f"  {'in all':<20} {total_s:4.0f} of {budget_s:.0f} s"])


def _bandwidth() -> float:
    """Return the bytes per second that the device can read; 0 if they are not known."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        kept = json.loads(CEILINGS.read_text())
        return float(kept["ceilings"]["bytes_per_s"])
    return 0.0


def _main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="directory")
    parser.add_argument(
        "--call", type=int, choices=(1, 2, 3), help="1: is it right; 2: how fast; 3: the rest"
    )
    parser.add_argument("--budget-s", type=float, help="seconds for all parts; default: 530 a call")
    parser.add_argument("--only", default="", help="parts whose name contains this")
    parser.add_argument("--cpu-smoke", action="store_true", help="tiny shapes, no GPU")
    given = parser.parse_args()
    started = time.monotonic()
    out = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="quire-gpu-"))
    # A process that a shell runs in the background ignores SIGINT, and its parts would, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    outcomes: list[Outcome] = []
    try:
        first = ceilings(is_smoke=given.cpu_smoke)
        run_all((first,), outcomes, work, out, first.seconds + _STOP_S)
        calls = smoke() if given.cpu_smoke else whole(_bandwidth())
        if given.call is not None:
            calls = calls[given.call - 1 : given.call]
        parts = tuple(part for call in calls for part in call if given.only in part.name)
        default_s = sum(part.seconds for part in parts) if given.cpu_smoke else MOST_S * len(calls)
        budget_s = (given.budget_s or default_s) - (time.monotonic() - started)
        print(plan_text(parts, budget_s), flush=True)
        run_all(parts, outcomes, work, out, budget_s)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
    finally:
        write(outcomes, out)
        pack(work, _TRITON_CACHE, out)
        shutil.rmtree(work)
        print(table(outcomes), flush=True)
    print(f"\n{time.monotonic() - started:.0f} s; {out / 'gpu.json'}")
    # On a GPU a failed part is a result, in the table; on a CPU it is a bug in these scripts.
    return 1 if given.cpu_smoke and any(outcome.error for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(_main())
