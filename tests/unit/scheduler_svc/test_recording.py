"""The contents and the format of a recording, and damaged ones."""

import struct
from zlib import crc32

import pytest
from recorded_runs import CONFIG, INFO, payloads, record, replay_bytes, rewrite, to_frame

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.journal.entries import CALLS, MAGIC, CutOff, RecordingError
from scheduler_svc.journal.record import Recordings
from scheduler_svc.journal.report import describe


def is_recorded(core):
    return core.recorder is not None


@pytest.mark.parametrize("number", [0, 1, 50])
def test_a_damaged_byte_is_caught(recorded, number):
    start = len(MAGIC) + sum(len(payload) + 8 for payload in payloads(recorded[0])[:number])
    content = bytearray(recorded[0].read_bytes())
    content[start + 10] ^= 0x40
    with pytest.raises(RecordingError, match=f"frame {number}, at byte {start}, is damaged"):
        replay_bytes(bytes(content))


@pytest.mark.parametrize("num_lost", [1, 5, 11])
def test_a_truncated_last_frame_is_reported_and_the_rest_replayed(recorded, num_lost):
    content, last = recorded[0].read_bytes(), payloads(recorded[0])[-1]
    result = replay_bytes(content[:-num_lost])
    assert result.difference is None
    assert result.ending == CutOff(len(last) + 8 - num_lost)
    assert result.num_steps == len(recorded[1].plans)
    assert "the recording is cut off" in "\n".join(describe(result))


def test_a_recording_without_an_end_is_reported_as_of_a_killed_process(recorded):
    content, last = recorded[0].read_bytes(), payloads(recorded[0])[-1]
    result = replay_bytes(content[: -len(last) - 8])
    assert (result.difference, result.ending) == (None, None)
    assert "the recording has no end" in "\n".join(describe(result))


def test_another_format_version_is_refused(recorded):
    def change(origin):
        origin |= {"format_version": 3, "quire_version": "9.9"}

    with pytest.raises(
        RecordingError,
        match=r"its format_version is 3, written by Quire 9\.9; this one reads 2",
    ):
        replay_bytes(rewrite(recorded[0], change_origin=change))


def test_a_configuration_that_the_core_does_not_know_is_refused(recorded):
    def change(origin):
        origin["config"]["page_size"] = origin["config"].pop("block_size")

    with pytest.raises(RecordingError, match="page_size"):
        replay_bytes(rewrite(recorded[0], change_origin=change))


def test_a_setting_of_another_type_is_refused(recorded):
    def change(origin):
        origin["config"]["block_size"] = "2"

    with pytest.raises(RecordingError, match=r"cannot use its settings: .*block_size"):
        replay_bytes(rewrite(recorded[0], change_origin=change))


@pytest.mark.parametrize("content", [b"", b"QUIRE", b"#!/bin/sh\n" * 9])
def test_a_file_that_is_no_recording_is_refused(content):
    with pytest.raises(RecordingError, match="it is not a recording"):
        replay_bytes(content)


def test_a_recording_stops_at_its_limit_and_the_core_goes_on(tmp_path):
    path, driver = record(tmp_path, max_bytes=40_000)
    assert path.stat().st_size < 40_200
    result = replay_bytes(path.read_bytes())
    assert result.difference is None
    assert result.ending == "--record-max-mb is reached"
    assert 0 < result.num_steps < len(driver.plans)


def test_recordings_share_their_limit(tmp_path):
    recordings = Recordings(tmp_path, 10, epoch=1)
    with recordings, recordings.open_core(INFO, CONFIG) as core:
        assert is_recorded(core)
    assert len(list(tmp_path.iterdir())) == 1
    recordings = Recordings(tmp_path, 0, epoch=2)
    with recordings, recordings.open_core(INFO, CONFIG) as core:
        assert not is_recorded(core)


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RecordingError, match=r"--record: .*file/x: cannot be created"):
        Recordings(tmp_path / "file" / "x", 10, epoch=1)


def test_a_file_that_is_there_is_not_written_over(tmp_path):
    (tmp_path / "w_0-1-1.quirerec").write_text("precious")
    recordings = Recordings(tmp_path, 1 << 20, epoch=1)
    with recordings, recordings.open_core(INFO, CONFIG) as core:
        assert not is_recorded(core)
    assert (tmp_path / "w_0-1-1.quirerec").read_text() == "precious"


def test_every_call_that_changes_a_core_is_recorded():
    public = {name for name in vars(Scheduler) if not name.startswith("_")}
    asking = {"load", "drain", "check_deadline", "take_expired", "num_queued_tokens"}
    asking |= {"num_waiting", "owner", "max_request_len", "watch_cache"}
    assert public - asking == set(CALLS)


def test_the_frame_is_as_documented(recorded):
    first = payloads(recorded[0])[0]
    frame = struct.pack("<II", len(first), crc32(first)) + first
    assert recorded[0].read_bytes().startswith(MAGIC + frame)


def test_a_call_of_a_newer_kind_is_refused(recorded):
    def change(entry):
        entry["call"] = "teleport"

    with pytest.raises(RecordingError, match="a call 'teleport', which this version does not"):
        replay_bytes(rewrite(recorded[0], change))


@pytest.mark.parametrize(
    ("name", "value"),
    [("arguments", {}), ("arguments", []), ("at", "noon"), ("plan", 3), ("raised", None)],
)
def test_an_entry_that_makes_no_sense_is_refused(recorded, name, value):
    def change(entry):
        if entry["call"] == "submit":
            entry[name] = value

    with pytest.raises(RecordingError, match="a frame cannot be read"):
        replay_bytes(rewrite(recorded[0], change))


def test_an_array_of_objects_is_refused(recorded):
    def change(entry):
        if entry["call"] == "submit":
            entry["arguments"]["request"]["prompt_token_ids"] = ["|O", bytes(8)]

    with pytest.raises(RecordingError, match="a frame cannot be read"):
        replay_bytes(rewrite(recorded[0], change))


def test_an_empty_payload_is_refused(recorded):
    content = MAGIC + to_frame(payloads(recorded[0])[0]) + to_frame(b"")
    with pytest.raises(RecordingError, match="a frame cannot be read"):
        replay_bytes(content)
