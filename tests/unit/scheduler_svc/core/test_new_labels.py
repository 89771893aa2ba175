"""New labels that wait for the next plan."""

from scheduler_svc.core.space.labels import NewLabels


def test_blocks_of_a_step_are_labelled_with_the_next_step():
    labels = NewLabels()
    labels.give([1], [bytes(32)])
    labels.begin_step()
    labels.give([2], [bytes(31) + b"2"])
    assert labels.take()[0].tolist() == [1]
    assert labels.take()[0].tolist() == []
    labels.begin_step()
    blocks, names = labels.take()
    assert blocks.tolist() == [2]
    assert names[0, 31] == ord("2")


def test_what_moves_in_the_step_is_named_where_it_will_be():
    labels = NewLabels()
    labels.give([1], [bytes(32)])
    labels.begin_step()
    labels.give([1], [bytes(32)])
    labels.give([5], [bytes(32)])
    labels.exchange(1, 5)
    assert labels.take()[0].tolist() == [1], "before the step it was here"
    labels.begin_step()
    assert labels.take()[0].tolist() == [5, 1]


def test_distrusted_blocks_get_no_label():
    labels = NewLabels()
    for block in (1, 2):
        labels.give([block], [bytes([block] * 32)])
    labels.begin_step()
    for block in (3, 4):
        labels.give([block], [bytes([block] * 32)])
    labels.forget({1, 3})
    for kept in (2, 4):
        blocks, names = labels.take()
        assert blocks.tolist() == [kept]
        assert names.tobytes() == bytes([kept] * 32)
        labels.begin_step()
    assert labels.take()[0].tolist() == []
