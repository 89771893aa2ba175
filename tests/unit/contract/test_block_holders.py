"""Blocks and their holders: the same as sets that are kept in the simplest way."""

from collections import defaultdict
from hashlib import sha256
from random import Random

from contract.block_holders import BlockHolders


def test_a_block_is_gone_when_its_last_holder_loses_it():
    holders, truth, draw = BlockHolders(), defaultdict(set), Random(1)
    names = [sha256(bytes([n])).digest() for n in range(100)]
    num_gone = 0
    for _ in range(500):
        holder, some = draw.choice("abc"), draw.sample(names, 10)
        match draw.choice(["add", "remove", "clear"]):
            case "add":
                holders.add(some, holder)
                for name in some:
                    truth[name].add(holder)
                continue
            case "remove":
                gone = holders.remove(some, holder)
            case "clear":
                some = names
                gone = [name for part in holders.clear(holder) for name in part]
        expected = [name for name in some if truth[name] == {holder}]
        for name in some:
            truth[name].discard(holder)
        assert sorted(gone) == sorted(expected)
        num_gone += len(gone)
    assert num_gone > 100


def test_a_holder_is_cleared_in_parts_of_bounded_size():
    holders = BlockHolders()
    names = [sha256(n.to_bytes(4, "big")).digest() for n in range(20_000)]
    holders.add(names, "a")
    parts = [*holders.clear("a")]
    assert max(map(len, parts)) < 1024
    assert sorted(name for part in parts for name in part) == sorted(names)
