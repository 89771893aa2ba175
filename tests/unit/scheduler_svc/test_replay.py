"""Replaying a recording gives the same plans, or reports where they differ."""

from dataclasses import replace

import numpy as np
import pytest
from recorded_runs import (
    CONFIG,
    INFO,
    Driver,
    DriverOfBadMemory,
    DriverOfPressure,
    DriverOfResizes,
    DriverOfSearches,
    record,
    replay_bytes,
    rewrite,
)

from contract.step import Result
from scheduler_svc.core.interface.config import PreemptionMode
from scheduler_svc.core.interface.errors import BrokenInvariantError, MigrationRefusedError
from scheduler_svc.journal.record import Recordings
from scheduler_svc.journal.replay import replay
from scheduler_svc.journal.report import describe, plan_lines


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
    assert result.recording.config == config
    assert result.load == driver.core.load()
    load, preemptions = result.load, result.preemptions
    assert min(load.num_swapped_in_blocks, load.num_demoted_blocks, load.num_promoted_blocks) > 0
    assert any(preemption.num_host_blocks for preemption in preemptions)
    assert any(preemption.has_failed_swap_in for preemption in preemptions)
    text = "\n".join(describe(result))
    assert "swapped in for it was corrupt" in text
    assert "host block" in text


def test_a_run_whose_pool_is_resized_replays_the_same(tmp_path):
    config = replace(CONFIG, max_num_blocks=16, min_num_blocks=10, num_host_blocks=6)
    with Recordings(tmp_path, 1 << 30, epoch=7) as records, records.open_core(INFO, config) as core:
        driver = DriverOfResizes(core, seed=1)
        driver.run(600)
    (path,) = tmp_path.iterdir()
    with path.open("rb") as file:
        result = replay(file)
    assert result.difference is None
    assert result.load == driver.core.load()
    assert result.load.num_moved_blocks > 0
    assert driver.num_shrunk > 2


def test_a_run_under_pressure_replays_the_same(tmp_path):
    with Recordings(tmp_path, 1 << 30, epoch=7) as records, records.open_core(INFO, CONFIG) as core:
        driver = DriverOfPressure(core, seed=1)
        driver.run(600)
    (path,) = tmp_path.iterdir()
    with path.open("rb") as file:
        result = replay(file)
    assert result.difference is None
    assert result.load == driver.core.load()
    assert result.load.num_memory_preemptions > 2
    for_memory = [each for each in result.preemptions if each.is_for_memory]
    assert len(for_memory) == result.load.num_memory_preemptions
    text = "\n".join(describe(result))
    assert text.count("memory was critical and too many sequences ran") == len(for_memory)


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


@pytest.mark.parametrize("seed", range(5))
def test_a_random_run_replays_the_same(tmp_path, seed):
    path, driver = record(tmp_path, seed)
    assert path.name == "w_0-7-1.quirerec"
    with path.open("rb") as file:
        result = replay(file)
    assert result.difference is None
    assert result.ending == "the worker is lost"
    assert result.recording.config == CONFIG
    assert (result.recording.origin.worker_id, result.recording.origin.epoch) == ("w/0", 7)
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
        if entry["plan"] is not None and entry["plan"]["step_id"] == plan.step_id:
            entry["plan"]["appended_block_ids"][0] ^= 1

    result = replay_bytes(rewrite(path, change))
    assert list(result.difference.fields) == ["appended_block_ids"]
    recorded_ids, replayed_ids = result.difference.fields["appended_block_ids"]
    assert replayed_ids == plan.appended_block_ids.tolist()
    assert recorded_ids[0] == replayed_ids[0] ^ 1
    assert result.num_steps == plan.step_id - 1
    report = "\n".join(describe(result))
    assert f"recorded: [{' '.join(map(str, recorded_ids))}]" in report
    assert f"  num_scheduled_tokens: {plan.num_scheduled_tokens}" in report


def test_an_input_that_was_changed_makes_a_difference(recorded):
    path, _ = recorded

    def change(entry):
        if entry["call"] == "submit" and entry["arguments"]["request"]["request_id"] == "r0":
            entry["arguments"]["request"]["prompt_token_ids"][1] += bytes(4)

    result = replay_bytes(rewrite(path, change))
    assert "new_sequences" in result.difference.fields


def test_a_refusal_that_does_not_come_again_is_a_difference(recorded):
    path, _ = recorded

    def change(entry):
        if entry["raised"] == "RequestTooLongError":
            entry["arguments"]["request"]["max_tokens"] = 1

    result = replay_bytes(rewrite(path, change))
    before, now = result.difference.fields["raised"]
    assert before == "RequestTooLongError" != now


def test_a_replay_raises_the_recorded_error(tmp_path):
    nothing = np.array([], np.int32)
    outcome = Result(9, nothing, nothing, nothing, nothing)

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
    assert result.ending.startswith("BrokenInvariantError: result of step 9")


def test_a_plan_is_shown_in_full(recorded):
    path, driver = recorded
    plan = next(plan for plan in driver.plans if plan.new_sequences)
    result = replay_bytes(path.read_bytes(), keep_step=int(plan.step_id))
    shown = list(plan_lines(result.kept_plan))
    new = plan.new_sequences[0]
    blocks = " ".join(map(str, new.block_ids.tolist()))
    assert f"  step_id: {plan.step_id}" in shown
    assert (
        f"    sequence {new.seq_id} in row {new.row}: {new.num_computed_tokens} of its "
        f"{len(new.token_ids)} tokens computed, blocks [{blocks}]"
    ) in shown


class DriverWithoutTime(Driver):
    """A driver whose pacer allows only a few prompt tokens."""

    def schedule(self):
        bounds = (self.dice.choice([None, 0, 1, 3]), self.dice.choice([None, 1, 2]))
        if (plan := self.core.schedule(self.now, *bounds)) is not None:
            self.plans.append(plan)
            self.unanswered.append(self.worker.execute(plan))


def test_a_run_in_which_prompts_are_bounded_replays_the_same(tmp_path):
    with Recordings(tmp_path, 1 << 30, epoch=7) as records, records.open_core(INFO, CONFIG) as core:
        driver = DriverWithoutTime(core, seed=3)
        driver.run(400)
    (path,) = tmp_path.iterdir()
    result = replay_bytes(path.read_bytes())
    assert result.difference is None, "\n".join(describe(result))
    assert result.load == driver.core.load()


class DriverOfMoves(Driver):
    """A driver in which requests leave the core and come back."""

    num_moves = 0

    def schedule(self):
        super().schedule()
        if self.dice.random() < 0.2:
            self.move()

    def move(self):
        seqs = sorted(self.core.live, key=lambda seq: seq.seq_id)
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
        self.num_moves += 1
        leaves = self.dice.random() < 0.7
        while self.core.steps.last_answered < max(export.ready_step, room.ready_step):
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
    assert driver.num_moves > 10
    (path,) = tmp_path.iterdir()
    with path.open("rb") as file:
        result = replay(file)
    assert result.difference is None, "\n".join(describe(result))
    assert result.load == driver.core.load()
    assert len(result.preemptions) == result.load.num_preemptions, "a move is no preemption"
