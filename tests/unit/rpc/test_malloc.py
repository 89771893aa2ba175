"""What a process has freed goes back to the system, though a few objects lie in between."""

import asyncio
import platform

import pytest

from rpc import malloc

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc"),
]


async def test_freed_memory_goes_back(monkeypatch):
    monkeypatch.setattr(malloc, "_FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(malloc, "_LAST_WAIT_S", 0.01)
    malloc.trim_malloc()  # what earlier tests have left would be used again
    trimming = asyncio.create_task(malloc.keep_trimmed())
    await asyncio.sleep(0)
    before = malloc._resident_bytes()
    pieces = [b"x" * 60_000 for _ in range(3_000)]
    grown = malloc._resident_bytes()
    assert grown > before + 150e6
    kept = pieces[::100]
    del pieces
    while malloc._resident_bytes() > before + 20e6:  # noqa: ASYNC110 - the system sends no event
        await asyncio.sleep(0.01)
    trimming.cancel()
    assert len(kept) == 30
