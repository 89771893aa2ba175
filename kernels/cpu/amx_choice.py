"""Decides which kernels use Intel's AMX, by a check and by timing, once per machine.

Quire's code for AMX was written without a CPU that has AMX. So Quire checks this code's results,
and measures whether AMX is faster than AVX-512. There is one decision for each format of weights,
and one for attention. A decision applies to any number of rows: AMX and AVX-512 add in different
orders, and the result of a row must not depend on how many rows are computed together. A file
beside the compiled library keeps the findings of check and timing, so that all workers of a machine
decide alike.
"""

import fcntl
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final, TextIO

import torch

from kernels.cpu.amx_trials import NUM_CHECKED_ROWS, TimedUse, make_checked, make_timed
from kernels.cpu.build import BuildError, cache_directory
from kernels.cpu.library import Library, native
from kernels.cpu.weight_memory import WEIGHT_MEMORY

USES: Final = {"bfloat16": 1 << 1, "int8": 1 << 2, "int4": 1 << 3, "attention": 1 << 4}
"""What may use AMX: linear maps, by the format of their weights, and attention. Each use has a bit
in C (`quire_amx_uses` in `amx.h`)."""
_ALL: Final = sum(USES.values())
_NUM_OUTPUT_TOKENS: Final = 64
"""AMX counts as faster for a use if it saves time in a single request that has a prompt of 512
tokens and this many output tokens."""
_TIMING_S: Final = 0.5
"""For how many seconds each use is measured."""
_MIN_ROUNDS: Final = 2
_ROUNDS_OF_ONE_ROW: Final = 4
_CHECKED_TOGETHER: Final = (1, 5, 16, 17, 32, 33)
"""The check computes `NUM_CHECKED_ROWS` input rows at once. Then, for each of these sizes, it
divides the rows into groups of this size, and computes the first and the last group again. Each row
must have the same result every time."""
_RELATIVE_ERROR: Final = 2.0**-7
"""The allowed relative error of a result, which is bfloat16's last place."""
_MAX_BEGUN: Final = 2
"""After this many checks that were begun and never ended, AMX stays off. A check never ends if an
AMX instruction kills the process."""
_LOCK_S: Final = 20.0
_LOCK_POLL_S: Final = 0.05
_CPU_INFO: Final = Path("/proc/cpuinfo")
_CPU_FIELDS: Final = ("model name", "cpu family", "model", "stepping", "microcode")


@dataclass(frozen=True, slots=True)
class Times:
    """How long one of the `USES` takes with AVX-512 and with AMX.

    In the fields' names, `prompt` stands for a prompt of 512 tokens, and `row` for a single token.
    """

    avx512_prompt_ms: float
    amx_prompt_ms: float
    avx512_row_ms: float
    amx_row_ms: float

    @property
    def is_faster(self) -> bool:
        """Whether AMX saves time if a prompt is followed by `_NUM_OUTPUT_TOKENS` output tokens."""
        with_amx = self.amx_prompt_ms + _NUM_OUTPUT_TOKENS * self.amx_row_ms
        return with_amx < self.avx512_prompt_ms + _NUM_OUTPUT_TOKENS * self.avx512_row_ms


@dataclass(frozen=True, slots=True)
class AmxFindings:
    """The result of checking and timing AMX on one machine."""

    machine: dict[str, str]
    """The CPU of the machine, and the versions of the system and of torch, from `_machine`."""
    date: str
    num_begun: int
    """The number of checks that have begun on the machine, including those that did not end."""
    failure: str | None = None
    """Why AMX cannot be used; None: AMX's results are right, or the check has not ended."""
    times: dict[str, Times] = field(default_factory=dict)
    """The times of each use; empty unless the check has succeeded."""


@dataclass(frozen=True, slots=True)
class AmxChoice:
    """The decision which computations in bfloat16 use AMX."""

    uses: tuple[str, ...]
    """The names of the computations that use AMX, as in `USES`."""
    findings: AmxFindings | None
    """The findings behind the decision; None: AMX is not wanted, so nothing was checked."""


def choose_amx(wanted: str) -> AmxChoice | None:
    """Check and time AMX, or read an earlier check's findings; then turn AMX on or off.

    No kernel may run during the call.

    Args:
        wanted: "auto" chooses the faster of AMX and AVX-512 for each use; "on" chooses AMX if its
            results are right; "off" never chooses AMX.

    Returns:
        The decision; None if the CPU, the system or the compiler does not support AMX.
    """
    library = native()
    if library is None or not library.use_amx(_ALL):
        return None
    library.use_amx(0)
    if wanted == "off":
        return AmxChoice((), findings=None)
    findings = _find(library)
    uses = tuple(use for use, each in findings.times.items() if wanted == "on" or each.is_faster)
    library.use_amx(sum(USES[use] for use in uses))
    return AmxChoice(uses, findings)


def _find(library: Library) -> AmxFindings:
    """Return the findings on this machine.

    If a file beside the compiled library has findings on this machine, return those. Otherwise
    check and time AMX, and write the findings to the file.
    """
    machine = _machine()
    try:
        with _locked(f"{library.build.path.stem}.amx.json") as file:
            kept = _read(file)
            is_ours = kept is not None and kept.machine == machine
            if kept is not None and is_ours and (kept.failure or kept.times):
                return kept
            num_begun = kept.num_begun if kept is not None and is_ours else 0
            if num_begun >= _MAX_BEGUN:
                failure = f"{num_begun} checks never ended; to try again, delete {file.name}"
                return AmxFindings(machine, _today(), num_begun, failure)
            # Instructions that this CPU or its hypervisor does not run would end the process.
            _write(file, AmxFindings(machine, _today(), num_begun + 1))
            findings = _examine(library, machine, num_begun + 1)
            _write(file, findings)
            return findings
    except OSError as error:
        # Do not check without a record: a check that ends the process would end it at every start.
        return AmxFindings(machine, _today(), 0, f"not checked: {error}")


def _examine(library: Library, machine: dict[str, str], num_begun: int) -> AmxFindings:
    try:
        failure = find_failure(library)
        times = {} if failure else time_all(library)
    except Exception as error:  # noqa: BLE001 - after any error the worker starts without AMX
        failure, times = f"the check failed: {error!r}", {}
    finally:
        library.use_amx(0)
        WEIGHT_MEMORY.begin_region()  # so that the weights packed here are freed together
    return AmxFindings(machine, _today(), num_begun, failure, times)


def find_failure(library: Library) -> str | None:
    """Describe the first wrong result with AMX; return None if all results are right.

    AMX is on afterwards.
    """
    for use in make_checked(library):
        library.use_amx(_ALL)
        together = use.compute(0, NUM_CHECKED_ROWS)
        error = (together.double() - use.exact).abs() - _RELATIVE_ERROR * use.exact.abs()
        if not bool((error <= use.absolute_error).all()):  # also true for NaN
            return f"{use.name}: a result is wrong by {error.max().item():.3g}"
        for num_rows in _CHECKED_TOGETHER:
            for first in 0, (NUM_CHECKED_ROWS - 1) // num_rows * num_rows:
                end = min(first + num_rows, NUM_CHECKED_ROWS)
                if not torch.equal(use.compute(first, end), together[first:end]):
                    rows = f"{end - first} rows from {first} on"
                    return f"{use.name}: {rows} differ from the same among {NUM_CHECKED_ROWS}"
    return None


def time_all(library: Library) -> dict[str, Times]:
    """Return how long each of the `USES` takes, with AMX and without. AMX is on afterwards."""
    return {name: time_both(library, use) for name, use in make_timed(library).items()}


def time_both(
    library: Library, use: TimedUse, clock: Callable[[], float] = time.perf_counter
) -> Times:
    """Time a use with and without AMX in several rounds; return the shortest times."""
    least = [float("inf")] * 4

    def measure(place: int, compute: Callable[[], object]) -> None:
        began = clock()
        compute()
        least[place] = min(least[place], 1000 * (clock() - began))

    end = clock() + _TIMING_S
    for number in count():
        if number > _MIN_ROUNDS and clock() > end:  # the first round is not counted
            break
        for uses_amx in False, True:
            library.use_amx(_ALL * uses_amx)
            measure(uses_amx, use.compute_prompt)
            for _ in range(_ROUNDS_OF_ONE_ROW):
                measure(2 + uses_amx, use.compute_token)
        if number == 0:
            least = [float("inf")] * 4
    return Times(*least)


@contextmanager
def _locked(name: str) -> Iterator[TextIO]:
    """Open and lock a file; raise OSError if another process holds the lock for too long."""
    with _opened(name) as file:
        end = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise TimeoutError(f"another process holds {file.name}") from None
                time.sleep(_LOCK_POLL_S)
        yield file


def _opened(name: str) -> TextIO:
    """Open a file beside the compiled libraries or, if it cannot be written, among temporary files.

    Raises:
        OSError: The file cannot be opened among temporary files either.
    """
    try:
        directory = cache_directory()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return (directory / name).open("a+")
    except (BuildError, OSError):  # in a container, often only temporary files can be written
        directory = Path(tempfile.gettempdir()) / f"quire-kernels-{os.getuid()}"
        directory.mkdir(mode=0o700, exist_ok=True)
        if directory.lstat().st_uid != os.getuid():
            raise PermissionError(f"{directory} belongs to another user") from None
        return (directory / name).open("a+")


def _read(file: TextIO) -> AmxFindings | None:
    """Return the findings in the file; None if it does not have the fields of `AmxFindings`."""
    file.seek(0)
    try:
        fields: dict[str, Any] = json.load(file)
        times = {name: Times(**each) for name, each in fields.pop("times", {}).items()}
        return AmxFindings(**fields, times=times)
    except (ValueError, TypeError, AttributeError):
        return None


def _write(file: TextIO, findings: AmxFindings) -> None:
    file.seek(0)
    file.truncate()
    json.dump(asdict(findings), file, indent=1)
    file.flush()
    os.fsync(file.fileno())  # on the disk before AMX runs, in case AMX stops the machine


def _today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())


def _machine() -> dict[str, str]:
    """Return this machine's CPU and microcode, and the versions of the system and of torch.

    Findings hold only for a machine for which this function returns the same. The version of the
    kernels is left out, because the name of the file with the findings has a hash of the kernels.
    """
    facts = {"system": platform.release(), "torch": torch.__version__}
    if _CPU_INFO.is_file():
        first = _CPU_INFO.read_text().split("\n\n", 1)[0]
        fields = (line.partition(":") for line in first.splitlines())
        cpu = {name.strip(): value.strip() for name, _, value in fields}
        facts |= {name: cpu[name] for name in _CPU_FIELDS if name in cpu}
    return facts
