"""Record a random run of the core against the property tests' worker, and replay it."""

import contextlib
import io
import random
import struct
from collections import deque
from dataclasses import fields, replace
from zlib import crc32

import numpy as np
import pytest

from quire.v1 import recording_pb2
from scheduler_svc.core.beam_search import BeamParams, EarlyStopping
from scheduler_svc.core.config import PreemptionMode, SchedulerConfig
from scheduler_svc.core.errors import (
    BrokenInvariantError,
    MigrationRefusedError,
    RequestRefusedError,
)
from scheduler_svc.core.eviction import Eviction
from scheduler_svc.core.plan import NewSequence, StepOutcome, StepPlan
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import OutputSoFar, Request, SeqKey, SourceId
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.successor import Successor
from scheduler_svc.core_calls import End, RecordedPlan
from scheduler_svc.domain import ModelInfo, WorkerInfo
from scheduler_svc.recording import Recordings, RecordingScheduler
from scheduler_svc.replay import replay
from scheduler_svc.replay_report import describe, describe_plan
from scheduler_svc.wire.frames import MAGIC, CutOff, RecordingError, read_frames, to_frame
from tests.property.worker import SEARCH, FakeWorker

CONFIG = SchedulerConfig(
    num_blocks=10,
    block_size=2,
    max_num_seqs=4,
    max_num_batched_tokens=8,
    max_model_len=24,
    max_waiting=6,
    watermark=0.0,
    eviction=Eviction.LFU,
)
INFO = WorkerInfo("w/0", "none", ModelInfo("m", 24, 2, (1,)), 4, 8, 10, 2)


class Driver:
    """Routers and a worker around a core, who do what the dice say."""

    searches = 0.0

    def __init__(self, core, seed):
        self.core = core
        self.dice = random.Random(seed)
        self.more_dice = random.Random(f"more {seed}")  # so that requests are what they were
        self.worker = FakeWorker(core.config)
        self.unanswered = deque()
        self.now = 100.0
        self.num_submitted = 0
        self.plans = []

    def run(self, num_turns):
        actions = [self.submit, self.schedule, self.schedule, self.update, self.update]
        for _ in range(num_turns):
            self.now += 0.25
            self.dice.choice(actions)()
            if self.dice.random() < 0.03:
                self.core.cancel(SourceId(0), [self.dice.randrange(self.num_submitted + 1)])
            if self.dice.random() < 0.01:
                self.core.cancel_source(SourceId(1))
            if self.more_dice.random() < 0.01:
                self.core.defragment()
        for _ in range(300):
            self.schedule()
            self.update()

    def submit(self):
        prompt = [self.dice.randrange(2) for _ in range(self.dice.randint(1, 12))]
        n = self.dice.randint(1, 2)
        request = Request(
            source=SourceId(self.dice.randrange(2)),
            first_seq_key=SeqKey(self.num_submitted),
            request_id=f"r{self.num_submitted}",
            prompt_token_ids=np.array(prompt, np.int32),
            n=n,
            max_tokens=self.dice.randint(1, 14),  # some are too long
            sampling=b"",
            cache_pin_s=self.more_dice.choice([None, None, 5.0]),
        )
        if self.dice.random() < 0.1:
            known = OutputSoFar(np.array([0], np.int32), finished=False)
            request = replace(request, max_tokens=9, outputs=(known,) * n)
        elif self.searches and self.dice.random() < self.searches:
            beam = BeamParams(2, (1,), self.dice.random(), EarlyStopping.NEVER)
            request = replace(request, sampling=SEARCH, beam=beam)
        self.num_submitted += n
        with contextlib.suppress(RequestRefusedError):
            self.core.submit(request, self.now)

    def schedule(self):
        if (plan := self.core.schedule(self.now)) is not None:
            self.plans.append(plan)
            self.unanswered.append(self.worker.execute(plan))

    def update(self):
        if self.unanswered:
            self.core.update(self.unanswered.popleft())


class DriverOfSearches(Driver):
    """A driver who has half of the requests search."""

    searches = 0.5


class DriverOfBadMemory(Driver):
    """A driver whose worker's host blocks go bad."""

    def schedule(self):
        if self.dice.random() < 0.2:
            self.worker.corrupt_host([self.dice.randrange(self.core.config.num_host_blocks)])
        super().schedule()


def record(folder, seed=1, max_bytes=1 << 30, num_turns=600, config=CONFIG):
    """Record a random run; give the file and who drove it."""
    with Recordings(folder, max_bytes, epoch=7) as records, records.open_core(INFO, config) as core:
        driver = Driver(core, seed)
        driver.run(num_turns)
    (path,) = folder.iterdir()
    return path, driver


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return record(tmp_path_factory.mktemp("recording"))


def test_a_run_with_a_host_tier_that_goes_bad_replays_the_same(tmp_path):
    config = replace(
        CONFIG, num_host_blocks=6, preemption_mode=PreemptionMode.SWAP, max_swap_blocks=2
    )
    with Recordings(tmp_path, 1 << 30, epoch=7) as records, records.open_core(INFO, config) as core:
        driver = DriverOfBadMemory(core, seed=1)
        driver.run(600)
    (path,) = tmp_path.iterdir()
    with path.open("rb") as file:
        result = replay(file)
    assert result.difference is None
    assert result.origin.config == config
    assert result.load == driver.core.load()
    load, preemptions = result.load, result.preemptions
    assert min(load.num_swapped_in_blocks, load.num_demoted_blocks, load.num_promoted_blocks) > 0
    assert any(preemption.num_host_blocks for preemption in preemptions)
    assert any(preemption.has_failed_swap_in for preemption in preemptions)
    text = "\n".join(describe(result))
    assert "is not what was swapped out" in text
    assert "host block" in text


def test_a_run_with_a_disk_replays_the_same(tmp_path):
    config = replace(
        CONFIG, num_host_blocks=4, num_disk_blocks=12, preemption_mode=PreemptionMode.SWAP
    )
    with Recordings(tmp_path, 1 << 30, epoch=7) as records, records.open_core(INFO, config) as core:
        driver = Driver(core, seed=1)
        driver.run(600)
    (path,) = tmp_path.iterdir()
    with path.open("rb") as file:
        result = replay(file)
    assert result.difference is None
    assert result.load == driver.core.load()
    assert min(result.load.num_stored_blocks, result.load.num_loaded_blocks) > 0


def test_a_run_with_searches_replays_the_same(tmp_path):
    config = replace(CONFIG, num_blocks=11)
    with Recordings(tmp_path, 1 << 30, epoch=7) as records, records.open_core(INFO, config) as core:
        driver = DriverOfSearches(core, seed=2)
        driver.run(600)
    (path,) = tmp_path.iterdir()
    with path.open("rb") as file:
        result = replay(file)
    assert result.difference is None
    assert result.load == driver.core.load()
    assert any(preemption.num_beams for preemption in result.preemptions)
    assert "a search, with" in "\n".join(describe(result))


def test_a_run_with_drafts_replays_the_same(tmp_path):
    path, driver = record(tmp_path, config=replace(CONFIG, num_draft_tokens=1))
    with path.open("rb") as file:
        result = replay(file)
    assert result.difference is None
    assert result.load == driver.core.load()
    assert result.num_steps == len(driver.plans)


def replay_bytes(content, **options):
    return replay(io.BytesIO(content), **options)


def rewrite(path, change):
    """Give the recording's content with each entry as `change` leaves it, checksums right."""
    with path.open("rb") as file:
        header, *payloads = read_frames(file)
    content = MAGIC + to_frame(header)
    for payload in payloads:
        entry = recording_pb2.RecordingEntry.FromString(payload)
        change(entry)
        content += to_frame(entry.SerializeToString())
    return content


@pytest.mark.parametrize("seed", range(5))
def test_a_random_run_replays_the_same(tmp_path, seed):
    path, driver = record(tmp_path, seed)
    assert path.name == "w_0-7-1.quirerec"
    with path.open("rb") as file:
        result = replay(file)
    assert result.difference is None
    assert result.ending == End("the worker is lost")
    assert result.origin.config == CONFIG
    assert (result.origin.worker_id, result.origin.epoch) == ("w/0", 7)
    assert result.num_steps == len(driver.plans)
    assert result.num_scheduled_tokens == sum(plan.num_scheduled_tokens for plan in driver.plans)
    assert result.load == driver.core.load()
    assert len(result.preemptions) == driver.core.load().num_preemptions


def test_the_run_has_in_it_what_matters(recorded):
    path, driver = recorded
    result = replay_bytes(path.read_bytes())
    assert len(result.preemptions) > 3
    assert result.num_refused > 3
    assert result.load.num_moved_blocks > 3
    assert any(plan.renamed_src_block_ids.size for plan in driver.plans)
    assert result.load.prefix_cache_hits > 0
    assert len(result.finish_reasons) == 3
    assert any(plan.copy_src_block_ids.size for plan in driver.plans)


def test_a_preemption_is_explained(recorded):
    path, driver = recorded
    result = replay_bytes(path.read_bytes())
    by_step = {plan.step_id: plan for plan in driver.plans}
    for preemption in result.preemptions:
        assert preemption.num_free_blocks < preemption.num_blocks_due
        assert preemption.num_own_blocks >= preemption.num_freed_blocks
        if preemption.resumed_step_id is None:
            continue
        new = next(
            new
            for new in by_step[preemption.resumed_step_id].new_sequences
            if new.seq_id == preemption.seq_id
        )
        assert len(new.token_ids) == preemption.num_known_tokens
        assert preemption.num_recomputed_tokens == len(new.token_ids) - new.num_computed_tokens
    first = result.preemptions[0]
    report = list(describe(result))
    index = next(i for i, line in enumerate(report) if line.startswith("preemption 1,"))
    assert report[index] == (
        f"preemption 1, planning step {first.step_id}: sequence {first.seq_id}, output "
        f"{first.output_index} of request {first.request_id!r}"
    )
    assert [line.split(":")[0].strip() for line in report[index + 1 : index + 5]] == [
        "why",
        "who",
        "gain",
        "cost",
    ]


def test_a_plan_that_differs_is_shown_in_full(recorded):
    path, driver = recorded
    plan = next(plan for plan in driver.plans if plan.appended_rows.size)

    def change(entry):
        recorded_plan = entry.schedule.plan
        if recorded_plan.step_id == plan.step_id:
            (block,) = struct.unpack_from("<i", recorded_plan.appended_block_ids)
            changed = struct.pack("<i", block ^ 1) + recorded_plan.appended_block_ids[4:]
            recorded_plan.appended_block_ids = changed

    result = replay_bytes(rewrite(path, change))
    (difference,) = result.difference.fields
    assert difference.name == "appended_block_ids"
    assert difference.replayed == tuple(plan.appended_block_ids.tolist())
    assert difference.recorded[0] == difference.replayed[0] ^ 1
    assert result.num_steps == plan.step_id - 1
    report = "\n".join(describe(result))
    assert f"recorded: [{' '.join(map(str, difference.recorded))}]" in report
    assert f"  num_scheduled_tokens: {plan.num_scheduled_tokens}" in report


def test_an_input_that_was_changed_makes_a_difference(recorded):
    path, _ = recorded

    def change(entry):
        if entry.submit.request_id == "r0":
            entry.submit.prompt_token_ids += bytes(4)

    result = replay_bytes(rewrite(path, change))
    assert "new_sequences" in [each.name for each in result.difference.fields]


def test_a_refusal_that_does_not_come_again_is_a_difference(recorded):
    path, _ = recorded

    def change(entry):
        if entry.raised == "RequestTooLongError":
            entry.submit.max_tokens = 1

    result = replay_bytes(rewrite(path, change))
    (difference,) = result.difference.fields
    assert difference.recorded == "RequestTooLongError"
    assert difference.replayed != difference.recorded


def test_what_the_core_raised_is_raised_again(tmp_path):
    nothing = np.array([], np.int32)
    outcome = StepOutcome(9, nothing, nothing, nothing, nothing)

    def fail():
        recordings = Recordings(tmp_path, 1 << 20, epoch=1)
        with recordings, recordings.open_core(INFO, CONFIG) as core:
            core.update(outcome)

    with pytest.raises(BrokenInvariantError):
        fail()
    (path,) = tmp_path.iterdir()
    result = replay_bytes(path.read_bytes())
    assert result.difference is None
    assert result.num_calls == 1
    assert result.ending.reason.startswith("BrokenInvariantError: result of step 9")


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
        assert type(core) is Successor


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RecordingError, match=r"--record: .*file/x: cannot be made"):
        Recordings(tmp_path / "file" / "x", 10, epoch=1)


def test_a_file_that_is_there_is_not_written_over(tmp_path):
    (tmp_path / "w_0-1-1.quirerec").write_text("precious")
    recordings = Recordings(tmp_path, 1 << 20, epoch=1)
    with recordings, recordings.open_core(INFO, CONFIG) as core:
        assert type(core) is Successor
    assert (tmp_path / "w_0-1-1.quirerec").read_text() == "precious"


def test_every_call_that_changes_a_core_is_recorded():
    calls = {
        name
        for name in vars(Scheduler) | vars(Replica) | vars(Successor)
        if not name.startswith("_")
    }
    asking = {"num_steps_in_flight", "load", "drain", "check_deadline", "take_expired"}
    asking |= {"num_cached_blocks", "num_queued_tokens", "find_requests", "first_swapped"}
    asking |= {"owner", "take_reports", "beam_rows"}
    asking |= {"unclaimed", "holds", "take_adopted", "held_device_blocks"}
    changing = calls - asking - {"last_answered", "held_host_blocks"}
    assert changing == {name for name in vars(RecordingScheduler) if not name.startswith("_")}


def test_all_of_a_plan_is_recorded():
    names = [field.name for field in fields(StepPlan)]
    follow = ("labelled_block_ids", "labels", "turns")  # from what is recorded
    names = [name for name in names if name not in follow]
    assert [field.name for field in fields(RecordedPlan)] == names
    assert [field.name for field in recording_pb2.RecordedPlan.DESCRIPTOR.fields] == names
    outcome = {field.name for field in fields(StepOutcome)}
    assert {field.name for field in recording_pb2.RecordedUpdate.DESCRIPTOR.fields} == outcome
    kept = {field.name for field in recording_pb2.RecordedNewSequence.DESCRIPTOR.fields}
    from_request = {
        "token_ids",
        "sampling",
        "traceparent",
        "num_prompt_tokens",
        "output_index",
        "max_total_tokens",
        "identity",
    }
    assert kept == {f.name for f in fields(NewSequence)} - from_request | {
        "num_tokens",
        "tokens_crc",
    }


def test_the_frame_is_as_documented():
    frame = to_frame(b"abc")
    assert frame == struct.pack("<II", 3, crc32(b"abc")) + b"abc"


def test_a_plan_is_shown_in_full(recorded):
    path, driver = recorded
    plan = next(plan for plan in driver.plans if plan.new_sequences)
    result = replay_bytes(path.read_bytes(), keep_step=int(plan.step_id))
    shown = list(describe_plan(result.kept_plan))
    new = plan.new_sequences[0]
    blocks = " ".join(map(str, new.block_ids.tolist()))
    assert shown[0] == f"  step_id: {plan.step_id}"
    assert (
        f"    sequence {new.seq_id} in row {new.row}: {new.num_computed_tokens} of its "
        f"{len(new.token_ids)} tokens computed, blocks [{blocks}]"
    ) in shown


def test_a_call_of_a_newer_kind_is_refused(recorded):
    with recorded[0].open("rb") as file:
        header, *_ = read_frames(file)
    content = MAGIC + to_frame(header) + to_frame(b"")
    with pytest.raises(RecordingError, match="no call that this reader knows"):
        replay_bytes(content)


class DriverOfMoves(Driver):
    """A driver who lets requests leave the core and come back to it."""

    def schedule(self):
        super().schedule()
        if self.dice.random() < 0.2:
            self.move()

    def move(self):
        seqs = sorted(self.core._live, key=lambda seq: seq.seq_id)
        if not seqs:
            return
        request = self.dice.choice(seqs).request
        try:
            export = self.core.begin_export(request.source, request.first_seq_key)
        except MigrationRefusedError:
            return
        try:
            room = self.core.begin_import(export.moved)
        except MigrationRefusedError:
            self.core.end_export(export.export_id, leaves=False)
            return
        leaves = self.dice.random() < 0.7
        while self.core.last_answered < max(export.ready_step, room.ready_step):
            Driver.schedule(self)
            self.update()
        held = [self.worker.host[block] for block in export.moved.host_block_ids]
        self.worker.host.update(zip(room.host_block_ids, held, strict=True))
        indices = self.core.end_export(export.export_id, leaves=leaves)
        self.core.end_import(room.import_id, indices if leaves else ())


def test_a_run_in_which_requests_move_replays_the_same(tmp_path):
    config = replace(CONFIG, num_host_blocks=12, bytes_per_block=2)
    with Recordings(tmp_path, 1 << 30, epoch=7) as records, records.open_core(INFO, config) as core:
        driver = DriverOfMoves(core, seed=3)
        driver.run(400)
    assert core._num_moves > 20
    (path,) = tmp_path.iterdir()
    with path.open("rb") as file:
        result = replay(file)
    assert result.difference is None, "\n".join(describe(result))
    assert result.load == driver.core.load()
