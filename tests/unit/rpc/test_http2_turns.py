"""Connections share the time for parsing, and no turn of the event loop takes long."""

import asyncio

import pytest

from rpc.http2 import turns as turns_module
from rpc.http2.turns import ParsingTurns


class Parser:
    """A connection with some slices to parse, each of which takes a millisecond."""

    def __init__(self, name, num_slices, done, clock):
        self.name, self.left, self.done, self.clock = name, num_slices, done, clock

    def parse(self):
        self.clock.now += 0.001
        self.done.append(self.name)
        self.left -= 1
        return self.left > 0


class Clock:
    now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(turns_module, "time", clock)
    return clock


async def test_a_connection_parses_at_once(clock):
    turns, done = ParsingTurns(), []
    turns.add(Parser("a", 2, done, clock))
    assert done == ["a", "a"]
    turns.add(Parser("b", 1, done, clock))
    assert done == ["a", "a", "b"]


async def test_connections_share_each_turn(clock):
    turns, done = ParsingTurns(), []
    for name in "abc":
        turns.add(Parser(name, 10, done, clock))
    first = len(done)
    assert 4 <= first <= 6
    await asyncio.sleep(0)
    assert 4 <= len(done) - first <= 6
    turns.add(Parser("d", 1, done, clock))  # it waits for its turn
    at = len(done)
    assert at < 15
    for _ in range(10):
        await asyncio.sleep(0)
    assert done.index("d") - at <= 3
    assert sorted(done) == ["a"] * 10 + ["b"] * 10 + ["c"] * 10 + ["d"]
    assert done[first : first + 4] not in (["a"] * 4, ["b"] * 4)
