"""Operators' settings and tenants' accounts outlive a scheduler and its workers."""

import asyncio
import json
import threading
from dataclasses import replace

import pytest
from adapters_harness import A, B, Router
from scheduler_fake_worker import FakeWorker
from scheduler_harness import running_scheduler

from contract.info import WorkerInfo
from contract.lora import LoraAdapter
from contract.worker_limits import Limits
from quire.v1 import scheduler_pb2
from scheduler_svc.operations import kept_state
from scheduler_svc.operations.kept_state import StateFile, StateFileError


async def serve_once(folder, socket, use, had=(), **options):
    """Starts a worker that has some adapters, and a scheduler; `use` gets the router and worker."""
    worker = FakeWorker(
        f"unix:{folder}/{socket}",
        num_blocks=16,
        max_num_blocks=64,
        block_size=4,
        block_bytes=1000,
    )
    for name, directory in had:
        worker.adapters.add(name, directory)
    await worker.start()
    options["state_file"] = folder / "state.json"
    async with running_scheduler(folder, [worker.target], **options) as scheduler:
        router = await Router(scheduler.target).connect()
        await router.wait_for_load(lambda load: load.num_workers == 1)
        result = await use(router, worker)
        await router.disconnect()
    await worker.die()
    return result


def read(folder):
    return json.loads((folder / "state.json").read_text())


def names(state):
    return [each["name"] for each in state["adapters"]]


async def test_adapters_that_operators_loaded_come_back(folder):
    async def load(router, _):
        # Each answer comes after the file is written.
        await router.load_adapter("sql", A)
        assert names(read(folder)) == ["sql"]
        await router.load_adapter("chat", B)
        await router.unload_adapter("chat")
        assert names(read(folder)) == ["sql"]

    async def listed(router, worker):
        return await router.listed(), worker.adapters.names

    await serve_once(folder, "w0", load, had=[("flag", "/adapters/f")])
    # The worker has restarted, too, without the flag that had named an adapter.
    assert await serve_once(folder, "w1", listed) == ([("sql", A)], ["sql"])


async def test_the_size_that_a_pool_was_given_comes_back(folder):
    async def resize(router, _):
        async for _answer in router.stub.ResizeKv(scheduler_pb2.ResizeKvRequest(num_blocks=40)):
            pass
        assert len(read(folder)["pools"]) == 1

    async def size(router, worker):
        await router.wait_for_load(lambda load: load.num_blocks == 40)
        return worker.info.worker_id

    await serve_once(folder, "w", resize)
    assert await serve_once(folder, "w", size)


async def test_a_tenant_s_account_comes_back(folder):
    def kept():
        (accounts,) = json.loads((folder / "state.json").read_text())["accounts"].values()
        return accounts

    async def use(router, _):
        await router.submit(0, range(8), tenant="a", max_tokens=4)
        await router.read_until(lambda: 0 in router.finished)

    async def rest(*_):
        pass

    await serve_once(folder, "w", use, policy="fair")
    assert kept() == {"a": 8 + 2 * 4}
    await serve_once(folder, "w", rest, policy="fair")
    assert kept() == {"a": 8 + 2 * 4}, "the worker's policy had it again, or it would be gone"


def test_the_accounts_of_workers_that_left_are_bounded():
    state = StateFile(None)
    for i in range(100):
        state.keep_accounts({f"w{i}": {"a": 1.0}})
    assert state.accounts_of("w99") == state.accounts_of("w98") == {"a": 1.0}
    assert state.accounts_of("w0") == {}
    state.keep_accounts({"w99": {}})
    assert state.accounts_of("w99") == {}, "all are alike again"


def test_a_scheduler_that_was_stopped_does_not_undo_what_its_successor_has_kept(tmp_path):
    path = tmp_path / "state.json"
    stopped = StateFile(path)
    stopped.keep_accounts({"w": {"a": 1.0}})
    stopped._write()
    successor = StateFile(path)
    successor.keep_accounts({"w": {"a": 2.0}})
    successor._write()
    stopped.keep_accounts({"w": {"a": 3.0}})
    stopped._write()
    assert StateFile(path).accounts_of("w") == {"a": 2.0}


async def test_the_loop_has_turns_between_the_accounts_of_workers(tmp_path):
    """A call that waits for the file gets an answer even when the disk is full."""
    path = tmp_path / "state.json"
    state, turns = StateFile(path), []

    def accounts_of(worker):
        turns.append(worker)
        asyncio.get_running_loop().call_soon(turns.append, "")
        return {"a": float(len(turns))}

    running = asyncio.create_task(
        state.run(lambda: {worker: lambda w=worker: accounts_of(w) for worker in "wxy"})
    )
    await state.written()
    assert turns[:6] == ["w", "", "x", "", "y", ""]
    assert StateFile(path).accounts_of("x") == {"a": 3.0}
    path.unlink()
    path.mkdir()
    await state.written()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await state.written()


async def test_what_changes_during_a_write_is_written_next(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_state, "_RETRY_S", 3600.0)
    state = StateFile(tmp_path / "state.json")
    begins, may_end, write = asyncio.Event(), threading.Event(), state._write
    loop = asyncio.get_running_loop()

    def slow_write():
        loop.call_soon_threadsafe(begins.set)
        may_end.wait()
        write()

    monkeypatch.setattr(state, "_write", slow_write)
    running = asyncio.create_task(state.run(dict))
    first = asyncio.create_task(state.written())
    await begins.wait()
    second = asyncio.create_task(state.written())
    await asyncio.sleep(0)
    may_end.set()
    await asyncio.wait_for(asyncio.gather(first, second), 30)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_the_size_is_a_model_s_own():
    state, info = (
        StateFile(None),
        WorkerInfo("w", "cpu", "m", Limits(1, 8, 8, 8, 16, 4), (), 9, "f"),
    )
    await state.keep_pool(info, 40)
    assert state.num_blocks(info) == 40
    assert state.num_blocks(replace(info, model_id="other")) is None
    assert state.num_blocks(replace(info, worker_id="v")) is None


def test_a_file_says_what_was_kept(tmp_path):
    path = tmp_path / "state.json"
    sql = LoraAdapter("sql", bytes(32), A)
    state = StateFile(path)
    state.keep_adapters([sql])
    state.keep_accounts({"w": {"a": 1.5, "b": 0.1}, "idle": {}})
    state._write()
    assert StateFile(path).adapters == (sql,)
    assert StateFile(path).accounts_of("w") == {"a": 1.5, "b": 0.1}
    assert StateFile(path).accounts_of("idle") == {}
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "{}",
        '{"version": 9}',
        '{"version": 1, "adapters": [1]}',
        '{"version": 1, "adapters": [], "pools": {"w": {"model": "m", "block_bytes": 9}}}',
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, content):
    path = tmp_path / "state.json"
    path.write_text(content)
    with pytest.raises(StateFileError, match=f"--state-file {path} (cannot|has version 9)"):
        StateFile(path)
