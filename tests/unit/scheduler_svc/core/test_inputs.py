"""A recorder makes the calls that change a core, and no others."""

from scheduler_svc.core.interface.inputs import core_input, input_names


class Recorder:
    """Records calls and makes them."""

    def __init__(self):
        self.calls = []

    def call(self, method, core, *args, **kwargs):
        self.calls.append((method.__name__, core, args, kwargs))
        return method(core, *args, **kwargs)


def make_kind():
    class Core:
        def __init__(self, recorder=None):
            self.recorder = recorder

        @core_input
        def divide(self, number, *, by):
            return number / by

        def read(self):
            return self.divide.__name__

    return Core


def test_a_recorder_makes_the_calls_of_inputs():
    recorder = Recorder()
    core = make_kind()(recorder)
    assert core.divide(6, by=3) == 2
    assert core.read() == "divide"
    assert recorder.calls == [("divide", core, (6,), {"by": 3})]


def test_without_a_recorder_inputs_are_plain_methods():
    assert make_kind()().divide(6, by=3) == 2


def test_only_inputs_are_named():
    assert input_names(make_kind()) == ("divide",)
