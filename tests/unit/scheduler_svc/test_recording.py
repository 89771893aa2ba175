"""What a recording holds, what its format says, and what is refused as damaged."""

import struct
from dataclasses import fields
from zlib import crc32

import pytest
from recorded_runs import CONFIG, INFO, record, replay_bytes

from contract.step import NewSequence, Plan, Result
from quire.v1 import recording_pb2
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.journal.core_calls import End, RecordedPlan
from scheduler_svc.journal.frames import MAGIC, CutOff, RecordingError, read_frames, to_frame
from scheduler_svc.journal.record import Recordings, RecordingScheduler
from scheduler_svc.journal.replay_report import describe


@pytest.mark.parametrize("number", [0, 1, 50])
def test_a_damaged_byte_is_caught(recorded, number):
    with recorded[0].open("rb") as file:
        before = list(read_frames(file))[:number]
    start = len(MAGIC) + sum(map(len, map(to_frame, before)))
    content = bytearray(recorded[0].read_bytes())
    content[start + 10] ^= 0x40
    with pytest.raises(RecordingError, match=f"frame {number}, at byte {start}, is damaged"):
        replay_bytes(bytes(content))


@pytest.mark.parametrize("num_lost", [1, 5, 11])
def test_a_last_frame_that_is_cut_off_is_said_and_the_rest_replayed(recorded, num_lost):
    content = recorded[0].read_bytes()
    with recorded[0].open("rb") as file:
        *_, last = read_frames(file)
    result = replay_bytes(content[:-num_lost])
    assert result.difference is None
    assert result.ending == CutOff(len(last) + 8 - num_lost)
    assert result.num_steps == len(recorded[1].plans)
    assert "it is cut off" in "\n".join(describe(result))


def test_a_recording_without_an_end_is_said_to_be_of_a_killed_process(recorded):
    content = recorded[0].read_bytes()
    with recorded[0].open("rb") as file:
        *_, last = read_frames(file)
    result = replay_bytes(content[: -len(last) - 8])
    assert (result.difference, result.ending) == (None, None)
    assert "it has no end" in "\n".join(describe(result))


def test_another_format_version_is_refused(recorded):
    with recorded[0].open("rb") as file:
        header, *_ = read_frames(file)
    message = recording_pb2.RecordingHeader.FromString(header)
    message.format_version, message.quire_version = 2, "9.9"
    with pytest.raises(
        RecordingError,
        match=r"its format_version is 2, written by Quire 9\.9; this one reads 1",
    ):
        replay_bytes(MAGIC + to_frame(message.SerializeToString()))


def test_a_configuration_that_the_core_does_not_know_is_refused(recorded):
    with recorded[0].open("rb") as file:
        header, *_ = read_frames(file)
    message = recording_pb2.RecordingHeader.FromString(header)
    message.config_json = message.config_json.replace("block_size", "page_size")
    with pytest.raises(RecordingError, match="page_size"):
        replay_bytes(MAGIC + to_frame(message.SerializeToString()))


@pytest.mark.parametrize("content", [b"", b"QUIRE", b"#!/bin/sh\n" * 9])
def test_what_is_no_recording_is_refused(content):
    with pytest.raises(RecordingError, match="it is no recording"):
        replay_bytes(content)


def test_a_recording_stops_at_its_limit_and_the_core_goes_on(tmp_path):
    path, driver = record(tmp_path, max_bytes=20_000)
    assert path.stat().st_size < 20_200
    result = replay_bytes(path.read_bytes())
    assert result.difference is None
    assert result.ending == End("--record-max-mb is reached")
    assert 0 < result.num_steps < len(driver.plans)


def test_recordings_share_their_limit(tmp_path):
    recordings = Recordings(tmp_path, 10, epoch=1)
    with recordings, recordings.open_core(INFO, CONFIG) as core:
        assert isinstance(core, RecordingScheduler)
    assert len(list(tmp_path.iterdir())) == 1
    recordings = Recordings(tmp_path, 0, epoch=2)
    with recordings, recordings.open_core(INFO, CONFIG) as core:
        assert type(core) is Scheduler


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RecordingError, match=r"--record: .*file/x: cannot be made"):
        Recordings(tmp_path / "file" / "x", 10, epoch=1)


def test_a_file_that_is_there_is_not_written_over(tmp_path):
    (tmp_path / "w_0-1-1.quirerec").write_text("precious")
    recordings = Recordings(tmp_path, 1 << 20, epoch=1)
    with recordings, recordings.open_core(INFO, CONFIG) as core:
        assert type(core) is Scheduler
    assert (tmp_path / "w_0-1-1.quirerec").read_text() == "precious"


def test_every_call_that_changes_a_core_is_recorded():
    calls = {name for name in vars(Scheduler) if not name.startswith("_")}
    asking = {"num_steps_in_flight", "load", "drain", "check_deadline", "take_expired", "owner"}
    asking |= {"num_waiting", "num_queued_tokens", "max_request_len", "beam_rows"}
    changing = calls - asking - {"take_reports", "take_adopted"}
    assert changing == {name for name in vars(RecordingScheduler) if not name.startswith("_")}


def test_all_of_a_plan_is_recorded():
    follow = {"labelled_block_ids", "labels", "pins", "turns"}  # from what is recorded
    names = {field.name for field in fields(Plan)} - follow - {"serialize"}
    names |= {"num_scheduled_tokens"}
    assert {field.name for field in fields(RecordedPlan)} == names
    assert {field.name for field in recording_pb2.RecordedPlan.DESCRIPTOR.fields} == names
    of_worker = {"execute_s", "logprobs", "prompt_logprobs", "num_computed_tokens", "head_start_s"}
    outcome = {field.name for field in fields(Result)} - of_worker
    recorded = {field.name for field in recording_pb2.RecordedUpdate.DESCRIPTOR.fields}
    assert recorded == {*outcome, "now"}
    kept = {field.name for field in recording_pb2.RecordedNewSequence.DESCRIPTOR.fields}
    from_request = {
        "token_ids",
        "sampling",
        "traceparent",
        "num_prompt_tokens",
        "output_index",
        "max_total_tokens",
        "identity",
        "search",
        "note",
        "adapter",
    }
    assert kept == {f.name for f in fields(NewSequence)} - from_request | {
        "num_tokens",
        "tokens_crc",
    }


def test_the_frame_is_as_documented():
    frame = to_frame(b"abc")
    assert frame == struct.pack("<II", 3, crc32(b"abc")) + b"abc"


def test_a_call_of_a_newer_kind_is_refused(recorded):
    with recorded[0].open("rb") as file:
        header, *_ = read_frames(file)
    content = MAGIC + to_frame(header) + to_frame(b"")
    with pytest.raises(RecordingError, match="no call that this reader knows"):
        replay_bytes(content)
