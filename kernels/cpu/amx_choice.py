"""Whether linear maps use Intel's AMX here: decided by a check and by timing, once on a machine.

A capability alone decides nothing: our code for AMX was written without such a CPU. One decision
applies to all maps and numbers of rows, because AMX and AVX-512 add in different orders. It is kept
in a file beside the compiled library, so the workers of a machine decide alike.
"""

import fcntl
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final, TextIO

import torch

from kernels.cpu.build import BuildError, cache_directory
from kernels.cpu.library import Library, native
from kernels.cpu.linear import PackedLinear, can_pack, pack, pack_integers
from kernels.cpu.weight_memory import WEIGHT_MEMORY

_PROMPT_ROWS: Final = 512
_NUM_OUTPUT_TOKENS: Final = 64
"""The comparison uses a request with these numbers of prompt and output tokens, on one stream."""
_TIMED_SHAPE: Final = (4096, 2048)
"""Output and input features: 16 MiB of weights."""
_TIMING_S: Final = 1.0
_MIN_ROUNDS: Final = 2
_ROUNDS_OF_ONE_ROW: Final = 4
_CHECKED_ROWS: Final = (1, 5, 16, 17, 32, 33, 100)
_RELATIVE_ERROR: Final = 2.0**-7
"""Of a result: bfloat16's last place."""
_ABSOLUTE_ERROR: Final = 1e-4
_MAX_BEGUN: Final = 2
"""Checks that may end with the process before AMX is left off."""
_LOCK_S: Final = 20.0
_LOCK_POLL_S: Final = 0.05
_CPU_INFO: Final = Path("/proc/cpuinfo")
_CPU_FIELDS: Final = ("model name", "cpu family", "model", "stepping", "microcode")


@dataclass(frozen=True, slots=True)
class AmxFindings:
    """What was found on this machine."""

    machine: dict[str, str]
    """CPU and versions for which it holds."""
    date: str
    num_begun: int
    """How often the check has begun, or failed to end, until it ended."""
    failure: str | None = None
    """What is wrong with AMX's results; None: nothing, and the times are there."""
    avx512_prompt_ms: float = 0.0
    """512 rows of a map; `row` is one row."""
    amx_prompt_ms: float = 0.0
    avx512_row_ms: float = 0.0
    amx_row_ms: float = 0.0

    @property
    def is_faster(self) -> bool:
        """Whether a request takes less time with AMX."""
        with_amx = self.amx_prompt_ms + _NUM_OUTPUT_TOKENS * self.amx_row_ms
        return with_amx < self.avx512_prompt_ms + _NUM_OUTPUT_TOKENS * self.avx512_row_ms


@dataclass(frozen=True, slots=True)
class AmxChoice:
    """Whether maps of bfloat16 use AMX from now on."""

    uses_amx: bool
    findings: AmxFindings | None
    """None: nothing was checked, since AMX is not wanted."""


def choose_amx(wanted: str) -> AmxChoice | None:
    """Check and time AMX, or read what an earlier check found, and turn it on or off.

    No kernel may run meanwhile.

    Args:
        wanted: "auto" is the faster one; "on" is AMX if its results are right; "off" is without.

    Returns:
        None if there is no AMX: the CPU, the system, or the compiler has none.
    """
    library = native()
    if library is None or not library.use_amx(True):
        return None
    library.use_amx(False)
    if wanted == "off":
        return AmxChoice(uses_amx=False, findings=None)
    findings = _find(library)
    is_wanted = findings.failure is None and (wanted == "on" or findings.is_faster)
    return AmxChoice(uses_amx=is_wanted and library.use_amx(True), findings=findings)


def _find(library: Library) -> AmxFindings:
    """Return what is kept in the file, or else check and time now, and keep it."""
    machine = _machine()
    try:
        with _locked(cache_directory() / f"{library.path.stem}.amx.json") as file:
            kept = _read(file)
            is_ours = kept is not None and kept.machine == machine
            if kept is not None and is_ours and (kept.failure or kept.amx_row_ms):
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
    except (BuildError, OSError):  # nothing can be kept
        return _examine(library, machine, 1)


def _examine(library: Library, machine: dict[str, str], num_begun: int) -> AmxFindings:
    try:
        failure = find_failure(library)
        times = (0.0,) * 4 if failure else time_both(library)
    except Exception as error:  # noqa: BLE001 - after any error the worker starts without AMX
        failure, times = f"the check failed: {error!r}", (0.0,) * 4
    finally:
        library.use_amx(False)
        WEIGHT_MEMORY.begin_region()  # what was packed here frees its memory
    return AmxFindings(machine, _today(), num_begun, failure, *times)


def find_failure(library: Library) -> str | None:
    """Return what is wrong with AMX's results; None: nothing. Leaves AMX on or off."""
    generator = torch.Generator().manual_seed(0)
    for name, apply, weight, bias in _maps(generator):
        x = torch.randn(max(_CHECKED_ROWS), apply.num_in, generator=generator).bfloat16()
        exact = x.double() @ weight.T + bias.double()
        library.use_amx(True)
        together = apply(x)
        error = (together.double() - exact).abs() - _RELATIVE_ERROR * exact.abs()
        if not bool((error <= _ABSOLUTE_ERROR).all()):  # also if it is NaN
            return f"{name}: a result is wrong by {error.max().item():.3g}"
        for num_rows in _CHECKED_ROWS:
            first = len(x) - num_rows
            if not torch.equal(apply(x[first:]), together[first:]):
                return f"{name}: {num_rows} rows differ from the same among {len(x)}"
    return None


def _maps(
    generator: torch.Generator,
) -> Iterator[tuple[str, PackedLinear, torch.Tensor, torch.Tensor]]:
    """Name, map, weight in float64 and bias of maps of each kind."""
    for num_out, num_in in (96, 576), (40, 70), (33, 2048):
        weight = torch.randn(num_out, num_in, generator=generator).div_(num_in**0.5).bfloat16()
        assert can_pack(weight)
        bias = torch.randn(num_out, generator=generator).bfloat16()
        yield f"bfloat16 [{num_out}, {num_in}]", pack(weight, bias), weight.double(), bias
    for bits, group, num_out, num_in in (8, 576, 96, 576), (8, 16, 40, 128), (4, 32, 96, 576):
        most, shape = 2 ** (bits - 1), (num_out, num_in // group)
        values = torch.randint(-most, most, (num_out, num_in), generator=generator)
        scales = torch.rand(shape, generator=generator).div_(most * num_in**0.5).half().double()
        offsets = None
        weight = values * scales.repeat_interleave(group, 1)
        if bits == 4:  # noqa: PLR2004  they have offsets, which C takes for values that begin at 0
            offsets = torch.randn(shape, generator=generator).div_(num_in**0.5).half() + 8 * scales
            weight += offsets.repeat_interleave(group, 1)
        bias = torch.randn(num_out, generator=generator).bfloat16()
        apply = pack_integers(bits, values.to(torch.int8), scales, offsets, bias, torch.bfloat16)
        yield f"int{bits} [{num_out}, {num_in}] in groups of {group}", apply, weight, bias


def time_both(
    library: Library, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float, float, float]:
    """Return the times of `AmxFindings`, each the least of some rounds that take turns."""
    apply = pack(torch.full(_TIMED_SHAPE, 0.01, dtype=torch.bfloat16), None)
    prompt = torch.full((_PROMPT_ROWS, apply.num_in), 0.01, dtype=torch.bfloat16)
    least = [float("inf")] * 4

    def measure(place: int, x: torch.Tensor) -> None:
        began = clock()
        apply(x)
        least[place] = min(least[place], 1000 * (clock() - began))

    end = clock() + _TIMING_S
    for number in count():
        if number > _MIN_ROUNDS and clock() > end:  # the first one is not counted
            break
        for uses_amx in False, True:
            library.use_amx(uses_amx)
            measure(uses_amx, prompt)
            for _ in range(_ROUNDS_OF_ONE_ROW):
                measure(2 + uses_amx, prompt[:1])
        if number == 0:
            least = [float("inf")] * 4
    return least[0], least[1], least[2], least[3]


@contextmanager
def _locked(path: Path) -> Iterator[TextIO]:
    """Open a file that no other process has; raises OSError if another one keeps it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("a+") as file:
        end = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise
                time.sleep(_LOCK_POLL_S)
        yield file


def _read(file: TextIO) -> AmxFindings | None:
    """Return what the file holds; None if it is empty or another version's."""
    file.seek(0)
    try:
        fields: dict[str, Any] = json.load(file)
        return AmxFindings(**fields)
    except (ValueError, TypeError):
        return None


def _write(file: TextIO, findings: AmxFindings) -> None:
    file.seek(0)
    file.truncate()
    json.dump(asdict(findings), file, indent=1)
    file.flush()
    os.fsync(file.fileno())  # it has to survive the machine, too, if AMX should stop that


def _today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())


def _machine() -> dict[str, str]:
    """The CPU and the versions for which findings hold; the library's are in the file's name."""
    facts = {"system": platform.release(), "torch": torch.__version__}
    if _CPU_INFO.is_file():
        first = _CPU_INFO.read_text().split("\n\n", 1)[0]
        fields = (line.partition(":") for line in first.splitlines())
        cpu = {name.strip(): value.strip() for name, _, value in fields}
        facts |= {name: cpu[name] for name in _CPU_FIELDS if name in cpu}
    return facts
