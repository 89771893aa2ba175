"""Runs a native program as if threads lost their cores again and again."""

import ctypes
import random
import struct

_SHARE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
_COUNT = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)


class _Call(ctypes.Structure):
    _fields_ = (
        ("share", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("args", ctypes.c_void_p),
        ("joins", ctypes.c_int64),
    )


class LateThreads:
    """Replaces `Library.run`: each share is done in any order, and twice.

    Between two shares it repeats shares of earlier calls, as late threads may do. It takes calls
    that share no memory with the present one, by `num_apart`.
    """

    def __init__(self, seed):
        self._random = random.Random(seed)
        self.num_redone = 0

    def __call__(self, head):
        address, num_calls, num_apart = struct.unpack("@Pqq", head)
        calls = (_Call * num_calls).from_address(address)
        firsts = [i for i in range(num_calls) if not calls[i].joins]
        ends = [*firsts[1:], num_calls]
        groups = [calls[first:end] for first, end in zip(firsts, ends, strict=True)]
        for g, end in enumerate(ends):
            late = [groups[i] for i in range(g) if firsts[i] >= end - num_apart]
            num_shares = _count(groups[g])
            for share in 2 * self._random.sample(range(num_shares), num_shares):
                _do(groups[g], share)
                for other in late:
                    self.num_redone += 1
                    _do(other, self._random.randrange(_count(other)))


def _count(group):
    return _COUNT(group[0].count)(group[0].args)


def _do(group, share):
    num_shares = _count(group)
    for call in group:
        _SHARE(call.share)(call.args, share, num_shares)
