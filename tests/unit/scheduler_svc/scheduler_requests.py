"""Requests as the core takes them."""

import numpy as np

from scheduler_svc.core.interface.request import Request


def make_request(source=1, key=0, n=1, **changes):
    return Request(source, key, f"r{key}", np.array([1, 2], np.int32), n, 5, b"", **changes)
