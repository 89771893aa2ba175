"""A process returns freed memory to the system, although a few objects lie in between."""

import asyncio
import gc
import platform

import pytest

from rpc import malloc

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc"),
]


@pytest.fixture
async def trimming(monkeypatch):
    monkeypatch.setattr(malloc, "_FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(malloc, "_LAST_WAIT_S", 0.01)
    gc.collect()
    malloc.trim_malloc()  # otherwise malloc reuses what earlier tests have freed
    task = asyncio.create_task(malloc.keep_trimmed())
    await asyncio.sleep(0)
    yield
    task.cancel()


async def wait_until_shrunk(to_bytes):
    while malloc._resident_bytes() > to_bytes:  # noqa: ASYNC110 - the system sends no event
        await asyncio.sleep(0.01)


@pytest.mark.usefixtures("trimming")
async def test_freed_memory_goes_back():
    before = malloc._resident_bytes()
    pieces = [b"x" * 60_000 for _ in range(3_000)]
    assert malloc._resident_bytes() > before + 150e6
    kept = pieces[::100]
    del pieces
    await wait_until_shrunk(before + 20e6)
    assert len(kept) == 30


class Circle:
    def __init__(self, piece):
        self.itself = self
        self.piece = piece


@pytest.mark.usefixtures("trimming")
async def test_what_few_objects_in_cycles_hold_goes_back():
    before = malloc._resident_bytes()
    gc.disable()
    try:
        for _ in range(3_000):
            Circle(b"x" * 60_000)
        assert malloc._resident_bytes() > before + 150e6
        await wait_until_shrunk(before + 20e6)
    finally:
        gc.enable()
