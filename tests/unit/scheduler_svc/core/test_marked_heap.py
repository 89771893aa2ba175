"""The heap with removals from the middle equals a sorted list."""

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.space.marked_heap import MarkedHeap


@dataclass(frozen=True)
class Waiting:
    """The part of a sequence that the heap uses."""

    seq_id: int


@given(
    keys=st.lists(st.integers(0, 5), min_size=1, max_size=80),
    again=st.integers(0, 80),
    data=st.data(),
)
def test_the_first_is_the_least_after_any_removal(keys, again, data):
    heap, model = MarkedHeap(), {}
    for seq_id, key in enumerate(keys):
        heap.push((key,), Waiting(seq_id))
        model[seq_id] = key
    for seq_id in data.draw(st.permutations(range(len(keys)))):
        heap.discard(Waiting(seq_id))
        heap.discard(Waiting(seq_id))  # the sequence is not in the heap any more
        del model[seq_id]
        if seq_id < again:  # preempted: it waits again
            heap.push((9,), Waiting(seq_id))
            heap.discard(Waiting(seq_id))
        assert len(heap) == len(model)
        first = heap.first()
        expected = min(((key, seq_id) for seq_id, key in model.items()), default=None)
        assert (first and (first[0][0], first[1].seq_id)) == expected


def test_marks_are_collected():
    heap = MarkedHeap()
    heap.push((0,), Waiting(0))
    for seq_id in range(1, 1000):
        heap.push((1,), Waiting(seq_id))
        heap.discard(Waiting(seq_id))
    assert len(heap._heap) < 40


class Counted(Waiting):
    """Counts how often a heap looks at items, because each look needs the hash."""

    num_looks = 0

    def __hash__(self):
        Counted.num_looks += 1
        return self.seq_id


def test_the_cost_of_a_removal_does_not_grow_with_the_heap():
    heap = MarkedHeap()
    for seq_id in range(1000):
        heap.push((seq_id,), Counted(seq_id))
    Counted.num_looks = 0
    for seq_id in reversed(range(500)):
        heap.discard(Counted(seq_id))
    assert Counted.num_looks < 10 * 500


def test_order_survives_the_collection_of_marks():
    rng = np.random.default_rng(0)
    heap = MarkedHeap()
    keys = rng.permutation(500).tolist()
    for seq_id, key in enumerate(keys):
        heap.push((key,), Waiting(seq_id))
    gone, live = np.split(rng.permutation(500), [300])
    for seq_id in gone.tolist():
        heap.discard(Waiting(seq_id))
    order = []
    while (first := heap.first()) is not None:
        order.append(first[1].seq_id)
        heap.discard(first[1])
    assert order == sorted(live.tolist(), key=keys.__getitem__)
