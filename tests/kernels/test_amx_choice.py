"""Which of AVX-512 and AMX is chosen, from what the check and the clock say."""

import fcntl
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels.cpu import amx_choice
from kernels.cpu.amx_choice import AmxFindings, choose_amx, find_failure, time_both
from kernels.cpu.build import BuildError

FASTER = (30.0, 5.0, 0.3, 0.3)
SLOWER_ROWS = (30.0, 5.0, 0.3, 0.9)


class FakeLibrary:
    """A library for a CPU that has AMX, or not."""

    path = Path("somewhere/abc.so")

    def __init__(self, *, has_amx=True):
        self.has_amx = has_amx
        self.uses_amx = False

    def use_amx(self, wanted):
        self.uses_amx = wanted and self.has_amx
        return self.uses_amx


@pytest.fixture
def amx(monkeypatch, tmp_path):
    """What the check finds, the times, and how often both were asked for; all can be set."""
    case = SimpleNamespace(
        library=FakeLibrary(),
        failure=None,
        times=FASTER,
        num_checks=0,
        file=tmp_path / "abc.amx.json",
    )

    def check(_):
        case.num_checks += 1
        return case.failure

    monkeypatch.setattr(amx_choice, "native", lambda: case.library)
    monkeypatch.setattr(amx_choice, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(amx_choice, "find_failure", check)
    monkeypatch.setattr(amx_choice, "time_both", lambda _: case.times)
    return case


@pytest.mark.parametrize("wanted", ["auto", "on", "off"])
def test_a_cpu_without_amx_is_left_as_it_is(amx, wanted):
    amx.library = FakeLibrary(has_amx=False)
    assert choose_amx(wanted) is None
    amx.library = None
    assert choose_amx(wanted) is None
    assert not amx.file.exists()


@pytest.mark.parametrize(
    ("wanted", "times", "uses_amx"),
    [
        ("auto", FASTER, True),
        ("auto", SLOWER_ROWS, False),
        ("on", SLOWER_ROWS, True),
        ("off", FASTER, False),
    ],
)
def test_the_faster_is_chosen_unless_the_setting_says_which(amx, wanted, times, uses_amx):
    amx.times = times
    choice = choose_amx(wanted)
    assert choice.uses_amx == amx.library.uses_amx == uses_amx
    assert amx.num_checks == (wanted != "off")


@pytest.mark.parametrize("wanted", ["auto", "on"])
def test_wrong_results_turn_it_off_for_good(amx, wanted):
    amx.failure = "bfloat16 [96, 576]: a result is wrong by 1"
    for _ in range(2):
        choice = choose_amx(wanted)
        assert not amx.library.uses_amx
        assert choice.findings.failure == amx.failure
    assert amx.num_checks == 1


def test_a_check_that_raises_turns_it_off(amx, monkeypatch):
    def fails(_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(amx_choice, "time_both", fails)
    choice = choose_amx("auto")
    assert not amx.library.uses_amx
    assert "no memory" in choice.findings.failure


def test_findings_are_kept_for_this_cpu_and_these_versions(amx, monkeypatch):
    first = choose_amx("auto")
    amx.times = SLOWER_ROWS
    assert choose_amx("auto") == first
    assert choose_amx("on") == first
    assert amx.num_checks == 1
    monkeypatch.setattr(amx_choice, "_machine", lambda: {"model name": "another"})
    assert not choose_amx("auto").uses_amx
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
    assert not amx.library.uses_amx
    assert amx.num_checks == 0
    assert choice.findings.failure == "2 checks never ended; to try again, delete " + str(amx.file)
    amx.file.unlink()
    assert choose_amx("auto").uses_amx


def test_one_check_that_never_ended_may_have_been_killed(amx):
    begun = {"machine": amx_choice._machine(), "date": "2026-11-23", "num_begun": 1}
    amx.file.write_text(json.dumps(begun))
    assert choose_amx("auto").uses_amx


@pytest.mark.parametrize("content", ["", "{", "[]", '{"of": "another version"}'])
def test_a_file_that_cannot_be_read_is_written_again(amx, content):
    amx.file.write_text(content)
    assert choose_amx("auto").uses_amx
    assert json.loads(amx.file.read_text())["amx_prompt_ms"] == FASTER[1]


def test_without_a_place_to_keep_them_findings_are_made_each_time(amx, monkeypatch, tmp_path):
    def homeless():
        raise BuildError("no home")

    (tmp_path / "file").write_text("")
    for place in (homeless, lambda: tmp_path / "file"):
        monkeypatch.setattr(amx_choice, "cache_directory", place)
        assert choose_amx("auto").uses_amx
    assert amx.num_checks == 2


def test_a_process_that_keeps_the_file_holds_up_no_other(amx, monkeypatch):
    monkeypatch.setattr(amx_choice, "_LOCK_S", 0.0)
    with amx.file.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert choose_amx("auto").uses_amx
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


def test_each_is_timed_and_the_first_round_is_not_counted(monkeypatch):
    library, now = FakeLibrary(), [0.0]
    rounds = []

    class Map:
        num_in = 16

        def __call__(self, x):
            if len(x) > 1:
                rounds.append(library.uses_amx)
            seconds = (0.4 if len(x) > 1 else 0.02) / (1 + library.uses_amx)
            now[0] += seconds / (100 if len(rounds) < 3 else 1)

    monkeypatch.setattr(amx_choice, "pack", lambda *_: Map())
    assert time_both(library, lambda: now[0]) == pytest.approx((400, 200, 20, 10))
    assert rounds == [False, True] * 3


def test_a_request_of_many_tokens_weighs_prompts_against_single_rows():
    findings = AmxFindings({}, "", 1, None, *FASTER)
    assert findings.is_faster
    assert not AmxFindings({}, "", 1, None, *SLOWER_ROWS).is_faster
