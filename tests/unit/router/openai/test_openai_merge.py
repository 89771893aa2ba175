import asyncio
from contextlib import aclosing

import pytest

from router.http.answers.merge import merge


async def stream(*items):
    for item in items:
        if isinstance(item, Exception):
            raise item
        yield item


async def test_every_stream_keeps_its_order():
    merged = [pair async for pair in merge([stream(*range(5)), stream(*range(3)), stream()])]
    assert [item for i, item in merged if i == 0] == list(range(5))
    assert [item for i, item in merged if i == 1] == list(range(3))
    assert len(merged) == 8


@pytest.mark.parametrize("num_others", [0, 2])
async def test_an_exception_is_raised(num_others):
    others = [stream(1, 2) for _ in range(num_others)]
    with pytest.raises(ValueError, match="broken"):
        async for _ in merge([stream(ValueError("broken")), *others]):
            pass


async def test_a_reader_that_waits_holds_the_streams_back():
    num_taken = 0

    async def long():
        nonlocal num_taken
        for num_taken in range(1, 1001):
            yield num_taken

    async with aclosing(merge([long(), long()])) as merged:
        await anext(merged)
        for _ in range(100):
            await asyncio.sleep(0)  # lets the streams run ahead
        assert num_taken <= 1 + 2 * 2


async def test_closing_leaves_no_task_behind():
    async def silent():
        await asyncio.Event().wait()
        yield

    before = asyncio.all_tasks()
    async with aclosing(merge([stream(1), silent()])) as merged:
        assert await anext(merged) == (0, 1)
    assert asyncio.all_tasks() == before
