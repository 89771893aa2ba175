"""The choice between AVX-512 and AMX, by the check's results and the measured times."""

import fcntl
import json
import os
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels.cpu import amx_choice, amx_trials
from kernels.cpu.amx_choice import USES, Times, choose_amx, find_failure, time_all, time_both
from kernels.cpu.amx_trials import CheckedUse, TimedUse
from kernels.cpu.build import Build, BuildError
from kernels.cpu.library import native
from kernels.cpu.linear import pack, pack_integers
from kernels.cpu.targets import THIS_CPU
from kernels.ops import paged_attention_decode, paged_attention_prefill
from tests.kernels.tensors import make_paged, make_quantized

FASTER = Times(30.0, 5.0, 0.3, 0.3)
SLOWER_ROWS = Times(30.0, 5.0, 0.3, 0.9)
ALL = sum(USES.values())


class FakeLibrary:
    """A library for a CPU that has AMX, or not."""

    build = Build(Path("somewhere/abc.so"), THIS_CPU)

    def __init__(self, *, has_amx=True):
        self.has_amx = has_amx
        self.uses = 0

    def use_amx(self, uses):
        self.uses = uses * self.has_amx
        return bool(self.uses)


@pytest.fixture
def amx(monkeypatch, tmp_path):
    """The check's finding, the times, and counts of both calls; a test can set all of them."""
    case = SimpleNamespace(
        library=FakeLibrary(),
        failure=None,
        times=dict.fromkeys(USES, FASTER),
        num_checks=0,
        file=tmp_path / "abc.amx.json",
    )

    def check(_):
        case.num_checks += 1
        return case.failure

    monkeypatch.setattr(amx_choice, "native", lambda: case.library)
    monkeypatch.setattr(amx_choice, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(amx_choice, "find_failure", check)
    monkeypatch.setattr(amx_choice, "time_all", lambda _: case.times)
    return case


@pytest.mark.parametrize("wanted", ["auto", "on", "off"])
def test_a_cpu_without_amx_is_left_as_it_is(amx, wanted):
    amx.library = FakeLibrary(has_amx=False)
    assert choose_amx(wanted) is None
    amx.library = None
    assert choose_amx(wanted) is None
    assert not amx.file.exists()


@pytest.mark.parametrize(
    ("wanted", "uses"),
    [("auto", ("bfloat16", "attention")), ("on", tuple(USES)), ("off", ())],
)
def test_the_faster_is_chosen_for_each_use_unless_the_setting_says_which(amx, wanted, uses):
    amx.times["int8"] = amx.times["int4"] = SLOWER_ROWS
    assert choose_amx(wanted).uses == uses
    assert amx.library.uses == sum(USES[each] for each in uses)
    assert amx.num_checks == (wanted != "off")


@pytest.mark.parametrize("wanted", ["auto", "on"])
def test_wrong_results_turn_it_off_for_good(amx, wanted):
    amx.failure = "bfloat16 [96, 576]: a result is wrong by 1"
    for _ in range(2):
        choice = choose_amx(wanted)
        assert not amx.library.uses
        assert choice.findings.failure == amx.failure
    assert amx.num_checks == 1


def test_a_check_that_raises_turns_it_off(amx, monkeypatch):
    def fails(_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(amx_choice, "time_all", fails)
    choice = choose_amx("auto")
    assert not amx.library.uses
    assert "no memory" in choice.findings.failure


def test_findings_are_kept_for_this_cpu_and_these_versions(amx, monkeypatch):
    first = choose_amx("auto")
    amx.times = dict.fromkeys(USES, SLOWER_ROWS)
    assert choose_amx("auto") == first
    assert choose_amx("on") == first
    assert amx.num_checks == 1
    monkeypatch.setattr(amx_choice, "_machine", lambda: {"model name": "another"})
    assert not choose_amx("auto").uses
    assert amx.num_checks == 2


def test_after_two_checks_that_never_ended_there_is_none(amx, monkeypatch):
    class KilledError(BaseException):
        """Stands for the end of the process."""

    def kill(_):
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(amx_choice, "find_failure", kill)
        for _ in range(2):
            with pytest.raises(KilledError):
                choose_amx("auto")
    choice = choose_amx("auto")
    assert not amx.library.uses
    assert amx.num_checks == 0
    assert choice.findings.failure == "2 checks never ended; to try again, delete " + str(amx.file)
    amx.file.unlink()
    assert choose_amx("auto").uses


def test_one_check_that_never_ended_may_have_been_killed(amx):
    begun = {"machine": amx_choice._machine(), "date": "2026-11-23", "num_begun": 1}
    amx.file.write_text(json.dumps(begun))
    assert choose_amx("auto").uses


@pytest.mark.parametrize("content", ["", "{", "[]", '{"of": "another version"}'])
def test_a_file_that_cannot_be_read_is_written_again(amx, content):
    amx.file.write_text(content)
    assert choose_amx("auto").uses
    kept = json.loads(amx.file.read_text())
    assert kept["times"]["int8"]["amx_prompt_ms"] == FASTER.amx_prompt_ms


def test_findings_are_kept_among_temporary_files_if_the_cache_cannot_be_written(
    amx, monkeypatch, tmp_path
):
    def homeless():
        raise BuildError("no home")

    (tmp_path / "file").write_text("")
    monkeypatch.setattr(amx_choice.tempfile, "gettempdir", lambda: str(tmp_path))
    for place in (homeless, lambda: tmp_path / "file", lambda: tmp_path / "file" / "below"):
        monkeypatch.setattr(amx_choice, "cache_directory", place)
        assert choose_amx("auto").uses
    assert amx.num_checks == 1
    user = os.getuid()
    directory = tmp_path / f"quire-kernels-{user}"
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.rename(tmp_path / f"quire-kernels-{user + 1}")
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert "belongs to another user" in choose_amx("auto").findings.failure


def test_a_check_that_nothing_would_remember_is_not_begun(amx, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(amx_choice, "cache_directory", lambda: tmp_path / "file")
    monkeypatch.setattr(amx_choice.tempfile, "gettempdir", lambda: str(tmp_path / "file"))
    choice = choose_amx("on")
    assert "not checked: " in choice.findings.failure
    assert not amx.library.uses
    assert amx.num_checks == 0, "if it ended the process, it would do so at each start"


def test_a_process_that_keeps_the_file_holds_up_no_other(amx, monkeypatch):
    monkeypatch.setattr(amx_choice, "_LOCK_S", 0.0)
    with amx.file.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        choice = choose_amx("auto")
    assert choice.findings.failure == f"not checked: another process holds {amx.file}"
    assert not amx.library.uses
    assert amx.file.read_text() == ""


def a_use(monkeypatch, change):
    """Have the check try one computation, whose results `change` makes wrong."""
    exact = torch.randn(100, 8, dtype=torch.float64)
    use = CheckedUse("a use", lambda first, end: change(exact[first:end].bfloat16()), exact, 1e-4)
    monkeypatch.setattr(amx_choice, "make_checked", lambda _: [use])


def test_the_check_finds_what_is_wrong(monkeypatch):
    library = FakeLibrary()
    a_use(monkeypatch, lambda out: out)
    assert find_failure(library) is None
    a_use(monkeypatch, lambda out: out + 0.1)
    assert "a use: a result is wrong by 0." in find_failure(library)
    a_use(monkeypatch, lambda out: out.index_fill(0, torch.tensor([99]), torch.nan))
    assert find_failure(library) == "a use: a result is wrong by nan"
    a_use(monkeypatch, lambda out: out.mul(1 + 2**-7 * (len(out) == 17)))
    assert find_failure(library) == "a use: 17 rows from 0 on differ from the same among 100"
    a_use(monkeypatch, lambda out: out.mul(1 + 2**-7 * (len(out) == 4)))
    assert find_failure(library) == "a use: 4 rows from 96 on differ from the same among 100"


def test_each_is_timed_and_the_first_round_is_not_counted():
    library, now = FakeLibrary(), [0.0]
    rounds = []

    def compute(seconds):
        now[0] += seconds / (1 + (library.uses > 0)) / (100 if len(rounds) < 3 else 1)

    def compute_prompt():
        rounds.append(library.uses)
        compute(0.4)

    times = time_both(library, TimedUse(compute_prompt, lambda: compute(0.02)), lambda: now[0])
    assert astuple(times) == pytest.approx((400, 200, 20, 10))
    assert rounds == [0, ALL] * 3


def test_a_request_of_many_tokens_weighs_prompts_against_single_rows():
    assert FASTER.is_faster
    assert not SLOWER_ROWS.is_faster


@pytest.fixture
def library():
    """The compiled one, left as it was."""
    library = native()
    if library is None:
        pytest.skip("needs native code")
    has_amx = library.use_amx(ALL)
    yield library
    library.use_amx(ALL * has_amx)


def test_the_check_finds_nothing_wrong_with_this_library(library):
    assert find_failure(library) is None


def test_all_uses_are_timed(library, monkeypatch):
    monkeypatch.setattr(amx_trials, "_TIMED_MAP", (64, 64))
    monkeypatch.setattr(amx_trials, "_TIMED_HEADS", (3, 1, 32))
    monkeypatch.setattr(amx_choice, "_TIMING_S", 0.0)
    times = time_all(library)
    assert list(times) == list(USES)
    assert all(min(astuple(each)) > 0 for each in times.values())


def test_amx_is_used_for_the_formats_that_are_named(library):
    """By the last bits of 7 * 2**-9 among large products that cancel out."""
    if not library.use_amx(ALL):
        pytest.skip("needs AMX, or its emulation")
    weight = torch.full((32, 64), 7, dtype=torch.int8)
    by_row, by_group = torch.ones(32, 1), torch.zeros(32, 2)
    maps = {
        "bfloat16": pack(weight.bfloat16(), None),
        "int8": pack_integers(8, weight, by_row, None, None, torch.bfloat16),
        "int4": pack_integers(4, weight, by_group + 1, by_group, None, torch.bfloat16),
    }
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    x[0, :30] = torch.tensor([1024, -1024], dtype=torch.bfloat16).repeat(15)
    x[0, 30] = 2**-9
    for name, apply in maps.items():
        library.use_amx(ALL - USES[name])
        by_avx512 = apply(x)
        library.use_amx(USES[name])
        assert not torch.equal(apply(x), by_avx512), name
        assert by_avx512[0, 0] == 7 * 2**-9


def with_and_without(library, compute):
    """What it returns with AMX for attention alone, and with AMX for all else."""
    results = []
    for uses in USES["attention"], ALL - USES["attention"]:
        library.use_amx(uses)
        results.append(compute())
    return results


def test_amx_is_used_for_attention_if_it_is_named(library):
    """By 2**-12 among large values that cancel out: AMX adds up those of even positions first."""
    if not library.use_amx(ALL):
        pytest.skip("needs AMX, or its emulation")
    paged = make_paged([31], 1, 64, 32, torch.bfloat16, "cpu")
    values = torch.tensor([1024, -1024], dtype=torch.bfloat16).repeat(16)
    values[30] = 2**-12
    paged.value_cache[paged.block_tables[0, 0]] = values.view(32, 1, 1)
    query = torch.zeros(2, 3, 64, dtype=torch.bfloat16)  # so all weights are equal
    starts = torch.tensor([0, 2], dtype=torch.int32)
    for compute in (
        lambda: paged_attention_decode(query[:1], *paged.args, 1.0),
        lambda: paged_attention_prefill(query, *paged.args, starts, 2, 1.0)[1:],
    ):
        by_amx, by_avx512 = with_and_without(library, compute)
        assert by_amx.count_nonzero() == 0
        assert torch.equal(by_avx512, torch.full((1, 3, 64), 2**-12 / 31).bfloat16())


@pytest.mark.parametrize(
    ("dtype", "head_dim", "stored"),
    [
        (torch.float32, 64, None),
        (torch.bfloat16, 80, None),
        (torch.bfloat16, 64, torch.int8),
        (torch.bfloat16, 64, torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_other_attention_is_what_it_is_without_amx(library, dtype, head_dim, stored):
    if not library.use_amx(ALL):
        pytest.skip("needs AMX, or its emulation")
    if stored is None:
        paged = make_paged([300], 1, head_dim, 16, dtype, "cpu")
    else:
        paged = make_quantized([300], 1, head_dim, 16, stored, "cpu")
    query = torch.randn(150, 3, head_dim).to(dtype)
    starts = torch.tensor([0, 150], dtype=torch.int32)
    args = query, *paged.args, starts, 150, head_dim**-0.5
    by_amx, by_avx512 = with_and_without(
        library, lambda: paged_attention_prefill(*args, **paged.scales)
    )
    assert torch.equal(by_amx, by_avx512)
