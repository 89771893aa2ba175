"""The choice between AVX-512 and AMX, by the check's results and the measured times."""

import fcntl
import json
import os
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels.cpu import amx_choice
from kernels.cpu.amx_choice import FORMATS, Times, choose_amx, find_failure, time_all, time_both
from kernels.cpu.build import BuildError
from kernels.cpu.library import native
from kernels.cpu.linear import pack, pack_integers

FASTER = Times(30.0, 5.0, 0.3, 0.3)
SLOWER_ROWS = Times(30.0, 5.0, 0.3, 0.9)
ALL = sum(FORMATS.values())


class FakeLibrary:
    """A library for a CPU that has AMX, or not."""

    path = Path("somewhere/abc.so")

    def __init__(self, *, has_amx=True):
        self.has_amx = has_amx
        self.formats = 0

    def use_amx(self, formats):
        self.formats = formats * self.has_amx
        return bool(self.formats)


@pytest.fixture
def amx(monkeypatch, tmp_path):
    """The check's finding, the times, and counts of both calls; a test can set all of them."""
    case = SimpleNamespace(
        library=FakeLibrary(),
        failure=None,
        times=dict.fromkeys(FORMATS, FASTER),
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
    ("wanted", "formats"),
    [("auto", ("bfloat16", "int8")), ("on", ("bfloat16", "int8", "int4")), ("off", ())],
)
def test_the_faster_is_chosen_for_each_format_unless_the_setting_says_which(amx, wanted, formats):
    amx.times["int4"] = SLOWER_ROWS
    assert choose_amx(wanted).formats == formats
    assert amx.library.formats == sum(FORMATS[each] for each in formats)
    assert amx.num_checks == (wanted != "off")


@pytest.mark.parametrize("wanted", ["auto", "on"])
def test_wrong_results_turn_it_off_for_good(amx, wanted):
    amx.failure = "bfloat16 [96, 576]: a result is wrong by 1"
    for _ in range(2):
        choice = choose_amx(wanted)
        assert not amx.library.formats
        assert choice.findings.failure == amx.failure
    assert amx.num_checks == 1


def test_a_check_that_raises_turns_it_off(amx, monkeypatch):
    def fails(_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(amx_choice, "time_all", fails)
    choice = choose_amx("auto")
    assert not amx.library.formats
    assert "no memory" in choice.findings.failure


def test_findings_are_kept_for_this_cpu_and_these_versions(amx, monkeypatch):
    first = choose_amx("auto")
    amx.times = dict.fromkeys(FORMATS, SLOWER_ROWS)
    assert choose_amx("auto") == first
    assert choose_amx("on") == first
    assert amx.num_checks == 1
    monkeypatch.setattr(amx_choice, "_machine", lambda: {"model name": "another"})
    assert not choose_amx("auto").formats
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
    assert not amx.library.formats
    assert amx.num_checks == 0
    assert choice.findings.failure == "2 checks never ended; to try again, delete " + str(amx.file)
    amx.file.unlink()
    assert choose_amx("auto").formats


def test_one_check_that_never_ended_may_have_been_killed(amx):
    begun = {"machine": amx_choice._machine(), "date": "2026-11-23", "num_begun": 1}
    amx.file.write_text(json.dumps(begun))
    assert choose_amx("auto").formats


@pytest.mark.parametrize("content", ["", "{", "[]", '{"of": "another version"}'])
def test_a_file_that_cannot_be_read_is_written_again(amx, content):
    amx.file.write_text(content)
    assert choose_amx("auto").formats
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
        assert choose_amx("auto").formats
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
    assert not amx.library.formats
    assert amx.num_checks == 0, "if it ended the process, it would do so at each start"


def test_a_process_that_keeps_the_file_holds_up_no_other(amx, monkeypatch):
    monkeypatch.setattr(amx_choice, "_LOCK_S", 0.0)
    with amx.file.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        choice = choose_amx("auto")
    assert choice.findings.failure == f"not checked: another process holds {amx.file}"
    assert not amx.library.formats
    assert amx.file.read_text() == ""


def a_map(monkeypatch, change):
    """Have the check try one map, whose results `change` makes wrong."""
    weight, bias = torch.randn(8, 16).bfloat16(), torch.randn(8).bfloat16()

    class Map:
        num_in = 16

        def __call__(self, x):
            return change((x.double() @ weight.T.double() + bias.double()).bfloat16())

    monkeypatch.setattr(amx_choice, "_maps", lambda _: [("a map", Map(), weight.double(), bias)])


def test_the_check_finds_what_is_wrong(monkeypatch):
    library = FakeLibrary()
    a_map(monkeypatch, lambda out: out)
    assert find_failure(library) is None
    a_map(monkeypatch, lambda out: out + 0.1)
    assert "a map: a result is wrong by 0." in find_failure(library)
    a_map(monkeypatch, lambda out: out.index_fill(0, torch.tensor([99]), torch.nan))
    assert find_failure(library) == "a map: a result is wrong by nan"
    a_map(monkeypatch, lambda out: out.mul(1 + 2**-7 * (len(out) == 17)))
    assert find_failure(library) == "a map: 17 rows differ from the same among 100"


def test_each_is_timed_and_the_first_round_is_not_counted():
    library, now = FakeLibrary(), [0.0]
    rounds = []

    class Map:
        num_in = 16

        def __call__(self, x):
            if len(x) > 1:
                rounds.append(library.formats)
            seconds = (0.4 if len(x) > 1 else 0.02) / (1 + (library.formats > 0))
            now[0] += seconds / (100 if len(rounds) < 3 else 1)

    times = time_both(library, Map(), lambda: now[0])
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


def test_all_formats_are_timed(library, monkeypatch):
    monkeypatch.setattr(amx_choice, "_TIMED_SHAPE", (64, 64))
    monkeypatch.setattr(amx_choice, "_TIMING_S", 0.0)
    times = time_all(library)
    assert list(times) == list(FORMATS)
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
        library.use_amx(ALL - FORMATS[name])
        by_avx512 = apply(x)
        library.use_amx(FORMATS[name])
        assert not torch.equal(apply(x), by_avx512), name
        assert by_avx512[0, 0] == 7 * 2**-9
