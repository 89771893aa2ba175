"""Examples of the memory level: a worse level takes effect at once, a better one after a while."""

import pytest
from pydantic import ValidationError

from contract.info import MemoryLevel
from gpu_worker.memory.pressure_level import LevelMeter, Thresholds, choose_thresholds
from gpu_worker.settings import WorkerSettings

OK, WARNING, CRITICAL = MemoryLevel


def levels(meter, *readings):
    return [meter.add(reading) for reading in readings]


def test_less_than_a_share_of_all_is_short():
    thresholds = Thresholds(warning=0.1, critical=0.05)
    read = [thresholds.level(available, 1000) for available in (100, 99, 50, 49, 0)]
    assert read == [OK, WARNING, WARNING, CRITICAL, CRITICAL]


def test_a_share_of_none_is_never_short_and_one_of_all_always_is():
    assert Thresholds(0.0, 0.0).level(0, 1000) is OK
    assert Thresholds(1.0, 0.0).level(999, 1000) is WARNING


def test_a_worse_level_counts_at_once():
    assert levels(LevelMeter(), OK, WARNING, CRITICAL) == [OK, WARNING, CRITICAL]


def test_a_better_level_counts_after_five_readings():
    meter = LevelMeter()
    assert levels(meter, CRITICAL, OK, OK, OK, OK) == [CRITICAL] * 5
    assert meter.add(OK) is OK


def test_the_worst_of_the_better_readings_counts():
    meter = LevelMeter()
    assert levels(meter, CRITICAL, OK, OK, WARNING, OK, OK)[-1] is WARNING
    assert levels(meter, OK, OK, OK, OK, OK) == [WARNING] * 4 + [OK]


def test_a_reading_that_is_no_better_restarts_the_count():
    meter = LevelMeter()
    levels(meter, WARNING, OK, OK, OK, OK)
    assert levels(meter, WARNING, OK, OK, OK, OK) == [WARNING] * 5
    assert meter.add(OK) is OK


def test_a_device_that_is_full_by_plan_has_less_to_lose():
    assert choose_thresholds(None, None, 500, 1000) == Thresholds(0.03, 0.01)
    assert choose_thresholds(None, None, 20, 1000) == Thresholds(0.01, 0.005)
    assert choose_thresholds(0.5, 0.25, 20, 1000) == Thresholds(0.5, 0.25)


def test_an_unset_threshold_fits_the_one_that_is_set():
    assert choose_thresholds(0.0, None, 500, 1000) == Thresholds(0.0, 0.0)
    assert choose_thresholds(None, 0.2, 500, 1000) == Thresholds(0.2, 0.2)


def test_a_critical_share_above_that_of_the_warning_is_refused(tmp_path):
    shares = {"memory_warning_share": 0.1, "memory_critical_share": 0.2}
    with pytest.raises(ValidationError, match="must be at most memory_warning_share"):
        WorkerSettings(model=tmp_path, **shares)
