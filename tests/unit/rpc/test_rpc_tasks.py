"""Several streams merged in the order of arrival; an error comes when the others have ended."""

import asyncio
from contextlib import aclosing

import pytest

from rpc.tasks import merged


async def counted(name, gates, ended, error=None):
    """Yield a number after each gate opens."""
    try:
        for number, gate in enumerate(gates):
            await gate.wait()
            yield f"{name}{number}"
        if error is not None:
            raise error
    finally:
        ended.append(name)


async def test_items_come_in_the_order_of_arrival():
    first, second, ended = asyncio.Event(), asyncio.Event(), []
    streams = [counted("a", [second], ended), counted("b", [first, second], ended)]
    received = []
    async with aclosing(merged(streams)) as merger:
        first.set()
        received.append(await anext(merger))
        second.set()
        received += [each async for each in merger]
    assert received[0] == "b0"
    assert sorted(received[1:]) == ["a0", "b1"]
    assert sorted(ended) == ["a", "b"]


async def test_an_error_comes_when_the_others_have_ended():
    gate, late, ended, received = asyncio.Event(), asyncio.Event(), [], []
    gate.set()
    failing = counted("a", [gate], ended, ValueError("no"))

    async def read():
        async for each in merged([failing, counted("b", [gate, late], ended)]):
            received.append(each)
            if len(received) == 2:
                late.set()

    with pytest.raises(ValueError, match="no"):
        await read()
    assert sorted(received) == ["a0", "b0", "b1"]


async def test_closing_the_merged_stream_ends_all():
    never, ended = asyncio.Event(), []
    gate = asyncio.Event()
    gate.set()
    async with aclosing(merged([counted("a", [gate, never], ended)])) as merger:
        assert await anext(merger) == "a0"
    assert ended == ["a"]
