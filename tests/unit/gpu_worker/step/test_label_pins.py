"""Pinned labels, with a clock that the test sets."""

import pytest

from gpu_worker.step.block_labels import LabelPins

A, B, C = b"a" * 32, b"b" * 32, b"c" * 32


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_a_pin_is_reported_until_it_expires(clock):
    pins = LabelPins(4, clock)
    pins.pin([(A, 5.0), (B, 9.0)])
    clock.now += 4
    assert pins.held() == ((A, 1.0), (B, 5.0))
    clock.now += 1
    assert pins.held() == ((B, 4.0),)


def test_what_is_pinned_again_ends_as_said_last_and_was_named_last(clock):
    pins = LabelPins(4, clock)
    pins.pin([(A, 5.0), (B, 5.0)])
    pins.pin([(A, 7.0)])
    assert pins.held() == ((B, 5.0), (A, 7.0))


def test_when_there_are_too_many_those_that_end_first_are_forgotten(clock):
    pins = LabelPins(2, clock)
    pins.pin([(A, 5.0), (B, 3.0), (C, 4.0)])
    assert pins.held() == ((A, 5.0), (C, 4.0))
    pins.clear()
    assert pins.held() == ()


def test_pins_whose_time_is_over_make_room_first(clock):
    pins = LabelPins(16, clock)
    pins.pin([(bytes([index]) * 32, 1.0) for index in range(16)])
    clock.now += 2
    pins.pin([(A, 5.0), (B, 5.0)])
    assert pins.held() == ((A, 5.0), (B, 5.0))
