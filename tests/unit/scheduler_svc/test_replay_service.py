"""`--record` of a whole scheduler, and `quire replay` of its recordings."""

from pathlib import Path

import pytest
from scheduler_fake_worker import expected_tokens
from scheduler_harness import running_scheduler

from quire.cli.__main__ import main

PROMPT = [3, 1, 4, 1, 5]


async def record_requests(folder, worker, connect, count=3):
    """Serve requests with `--record`; return the recordings."""
    async with running_scheduler(folder, [worker.target], record=folder / "rec") as scheduler:
        router = await connect(scheduler.target)
        for key in range(count):
            await router.submit(key, PROMPT, max_tokens=8)
        await router.read_until_finished(*range(count))
        assert router.tokens[0] == expected_tokens(PROMPT, 8)
        await router.disconnect()
    return sorted((folder / "rec").iterdir())


async def test_a_schedulers_recording_replays(folder, worker, connect, capsys):
    (path,) = await record_requests(folder, worker, connect)
    assert main(["replay", str(path)]) == 0
    output = capsys.readouterr().out
    assert "every plan is the same" in output
    assert "requests    3, of which 0 were refused" in output
    assert "sequences   ended: 3 LENGTH" in output
    assert "24 sampled" in output
    assert "the recording ends because: the scheduler has ended" in output


async def test_a_step_is_shown_in_full(folder, worker, connect, capsys):
    (path,) = await record_requests(folder, worker, connect)
    assert main(["replay", str(path), "--step", "1"]) == 0
    assert "sequence 1 in row 0: 0 of its 5 tokens computed" in capsys.readouterr().out
    assert main(["replay", str(path), "--step", "1000"]) == 1
    assert "--step: 1000: it must be one of the steps 1 to" in capsys.readouterr().err


async def test_a_damaged_recording_exits_with_one(folder, worker, connect, capsys):
    (path,) = await record_requests(folder, worker, connect)
    content = bytearray(path.read_bytes())
    content[30] ^= 1
    path.write_bytes(content)
    assert main(["replay", str(path)]) == 1
    assert f"quire: {path}: frame 0, at byte 8, is damaged" in capsys.readouterr().err


async def test_each_attachment_has_a_recording_of_its_own(folder, worker, connect):
    async with running_scheduler(folder, [worker.target], record=folder / "rec") as scheduler:
        router = await connect(scheduler.target)
        await router.submit(1, PROMPT, max_tokens=4)
        await router.read_until_finished(1)
        await worker.die()
        await router.wait_for_load(lambda load: load.num_workers == 0)
        await worker.start()
        await router.wait_for_load(lambda load: load.num_workers == 1)
        await router.disconnect()
    paths = sorted((folder / "rec").iterdir())
    assert len(paths) == 2
    assert [main(["replay", str(path)]) for path in paths] == [0, 0]


async def test_without_the_flag_nothing_is_written(folder, worker):
    async with running_scheduler(folder, [worker.target]):
        assert not list(folder.glob("**/*.quirerec"))


@pytest.mark.parametrize("path", ["nothing", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch, capsys, path):
    monkeypatch.chdir(tmp_path)
    assert main(["replay", path]) == 1
    assert capsys.readouterr().err.startswith(f"quire: {Path(path)}: ")
