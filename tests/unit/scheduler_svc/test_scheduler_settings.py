"""A scheduler's settings, and refused values."""

import pytest

from rpc.settings import parse_settings
from scheduler_svc.settings import SchedulerSettings


class TestSettings:
    @pytest.mark.parametrize(
        "argv", [["--workers", "a:1,unix:/b"], ["--workers", "a:1", "--workers", "unix:/b"]]
    )
    def test_workers_are_listed_by_commas_or_one_by_one(self, argv):
        assert parse_settings(SchedulerSettings, "q", argv).workers == ("a:1", "unix:/b")

    def test_workers_come_from_the_environment(self, monkeypatch):
        monkeypatch.setenv("QUIRE_WORKERS", "a:1,b:2")
        assert parse_settings(SchedulerSettings, "q", []).workers == ("a:1", "b:2")

    @pytest.mark.parametrize(
        ("argv", "problem"),
        [
            (["--workers", "a:1,a:1"], "a:1 twice"),
            (["--workers", ","], "is empty"),
            (["--max-waiting", "0"], "--max-waiting: 0"),
            (["--watermark", "1"], "--watermark: 1"),
            (["--epoch", "0"], "--epoch: 0"),
            (["--max-prefill-chunk", "0"], "--max-prefill-chunk: 0"),
            (["--step-timeout-s", "0"], "--step-timeout-s: 0"),
            (["--standby-http"], "--standby-http needs --standby"),
        ],
    )
    def test_wrong_value_is_named(self, argv, problem, capsys):
        with pytest.raises(SystemExit) as caught:
            parse_settings(SchedulerSettings, "q", argv)
        assert caught.value.code == 2
        assert problem in capsys.readouterr().err
