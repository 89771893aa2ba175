"""Decides by a check and by timing, once per machine, whether linear maps use Intel's AMX.

It is not enough that the CPU has AMX, because Quire's code for AMX was written without such a CPU.
There is one decision for each format of weights. It applies to any number of rows, because AMX and
AVX-512 add in different orders. A file beside the compiled library keeps the findings, so that all
workers of a machine decide alike.
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

from kernels.cpu.build import BuildError, cache_directory
from kernels.cpu.library import Library, native
from kernels.cpu.linear import PackedLinear, can_pack, pack, pack_integers
from kernels.cpu.weight_memory import WEIGHT_MEMORY

FORMATS: Final = {"bfloat16": 1 << 1, "int8": 1 << 2, "int4": 1 << 3}
"""Maps each format of weights to C's bit for it, 1 << `kept` in `linear.c`."""
_ALL: Final = sum(FORMATS.values())
_PROMPT_ROWS: Final = 512
_NUM_OUTPUT_TOKENS: Final = 64
"""The comparison assumes a single stream, of a request with these numbers of prompt and output
tokens."""
_TIMED_SHAPE: Final = (4096, 2048)
"""Output and input features: 16 MiB of weights in bfloat16."""
_TIMING_S: Final = 0.5
"""How long each format is timed."""
_MIN_ROUNDS: Final = 2
_ROUNDS_OF_ONE_ROW: Final = 4
_TIMED_GROUP: Final = 32
"""Input features per group of 4-bit weights."""
_CHECKED_ROWS: Final = (1, 5, 16, 17, 32, 33, 100)
_RELATIVE_ERROR: Final = 2.0**-7
"""Allowed error as a share of the result: one unit in bfloat16's last place."""
_ABSOLUTE_ERROR: Final = 1e-4
_MAX_BEGUN: Final = 2
"""AMX stays off after this many checks that began and did not end."""
_LOCK_S: Final = 20.0
_LOCK_POLL_S: Final = 0.05
_CPU_INFO: Final = Path("/proc/cpuinfo")
_CPU_FIELDS: Final = ("model name", "cpu family", "model", "stepping", "microcode")


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds that one map takes for a prompt of 512 rows and for a single row."""

    avx512_prompt_ms: float
    amx_prompt_ms: float
    avx512_row_ms: float
    amx_row_ms: float

    @property
    def is_faster(self) -> bool:
        """Whether a request takes less time with AMX."""
        with_amx = self.amx_prompt_ms + _NUM_OUTPUT_TOKENS * self.amx_row_ms
        return with_amx < self.avx512_prompt_ms + _NUM_OUTPUT_TOKENS * self.avx512_row_ms


@dataclass(frozen=True, slots=True)
class AmxFindings:
    """The result of checking and timing AMX on one machine."""

    machine: dict[str, str]
    """The CPU and the versions for which the findings hold."""
    date: str
    num_begun: int
    """Number of checks that have begun, the last one included."""
    failure: str | None = None
    """Why AMX cannot be used; None: its results are right, or the check has not ended."""
    times: dict[str, Times] = field(default_factory=dict)
    """By format of weights; empty: not measured."""


@dataclass(frozen=True, slots=True)
class AmxChoice:
    """The decision, with its reason."""

    formats: tuple[str, ...]
    """The formats of weights for which bfloat16 maps use AMX from now on."""
    findings: AmxFindings | None
    """None: nothing was checked, because AMX is not wanted."""


def choose_amx(wanted: str) -> AmxChoice | None:
    """Check and time AMX, or read an earlier check's findings; then turn AMX on or off.

    No kernel may run during the call.

    Args:
        wanted: "auto" uses AMX for each format of weights for which it is faster; "on" uses AMX if
            its results are right; "off" never uses it.

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
    formats = tuple(f for f, each in findings.times.items() if wanted == "on" or each.is_faster)
    library.use_amx(sum(FORMATS[each] for each in formats))
    return AmxChoice(formats, findings)


def _find(library: Library) -> AmxFindings:
    """Return the findings in the file; if there are none, check, measure, and write the file."""
    machine = _machine()
    try:
        with _locked(f"{library.path.stem}.amx.json") as file:
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
        # Without a record of the attempt, a check that ends the process would end it at each start.
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
    """Return the fault in AMX's results; None if they are right. AMX may be on afterwards."""
    generator = torch.Generator().manual_seed(0)
    for name, apply, weight, bias in _maps(generator):
        x = torch.randn(max(_CHECKED_ROWS), apply.num_in, generator=generator).bfloat16()
        exact = x.double() @ weight.T + bias.double()
        library.use_amx(_ALL)
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
    """Yield maps of each kind: the name, the map, its weight in float64, and its bias."""
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
        if bits == 4:  # noqa: PLR2004  with offsets, from which `pack_integers` takes 8 * scale
            offsets = torch.randn(shape, generator=generator).div_(num_in**0.5).half() + 8 * scales
            weight += offsets.repeat_interleave(group, 1)
        bias = torch.randn(num_out, generator=generator).bfloat16()
        apply = pack_integers(bits, values.to(torch.int8), scales, offsets, bias, torch.bfloat16)
        yield f"int{bits} [{num_out}, {num_in}] in groups of {group}", apply, weight, bias


def time_all(library: Library) -> dict[str, Times]:
    """Return the times of each format of weights."""
    num_out, num_in = _TIMED_SHAPE
    ones = torch.ones(_TIMED_SHAPE, dtype=torch.int8)
    by_row = torch.ones(num_out, 1)
    by_group = torch.ones(num_out, num_in // _TIMED_GROUP)
    maps = {
        "bfloat16": pack(ones.bfloat16(), None),
        "int8": pack_integers(8, ones, by_row, None, None, torch.bfloat16),
        "int4": pack_integers(4, ones, by_group, by_group, None, torch.bfloat16),
    }
    return {name: time_both(library, apply) for name, apply in maps.items()}


def time_both(
    library: Library, apply: PackedLinear, clock: Callable[[], float] = time.perf_counter
) -> Times:
    """Time a map with AVX-512 and AMX in alternating rounds; return the least time of each."""
    prompt = torch.full((_PROMPT_ROWS, apply.num_in), 0.01, dtype=torch.bfloat16)
    least = [float("inf")] * 4

    def measure(place: int, x: torch.Tensor) -> None:
        began = clock()
        apply(x)
        least[place] = min(least[place], 1000 * (clock() - began))

    end = clock() + _TIMING_S
    for number in count():
        if number > _MIN_ROUNDS and clock() > end:  # the first round is not counted
            break
        for uses_amx in False, True:
            library.use_amx(_ALL * uses_amx)
            measure(uses_amx, prompt)
            for _ in range(_ROUNDS_OF_ONE_ROW):
                measure(2 + uses_amx, prompt[:1])
        if number == 0:
            least = [float("inf")] * 4
    return Times(*least)


@contextmanager
def _locked(name: str) -> Iterator[TextIO]:
    """Open and lock a file; raises OSError if another process holds the lock."""
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
    """Open a file beside the compiled libraries, or where temporary files are; raises OSError."""
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
    """Return the findings in the file; None if it is empty or of another version."""
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
    """Return the CPU and the versions for which findings hold, without the library's version."""
    facts = {"system": platform.release(), "torch": torch.__version__}
    if _CPU_INFO.is_file():
        first = _CPU_INFO.read_text().split("\n\n", 1)[0]
        fields = (line.partition(":") for line in first.splitlines())
        cpu = {name.strip(): value.strip() for name, _, value in fields}
        facts |= {name: cpu[name] for name in _CPU_FIELDS if name in cpu}
    return facts
