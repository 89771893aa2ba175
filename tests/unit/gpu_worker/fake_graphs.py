"""A backend without a GPU: `capture` stores the computation, and a replay calls it."""


class FakeGraphs:
    """`fails_at` is the number of the capture that fails, from 0; None: none fails."""

    def __init__(self, fails_at=None):
        self.fails_at = fails_at
        self.num_captures = 0
        self.num_replays = 0

    def capture(self, compute):
        if self.num_captures == self.fails_at:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.num_captures += 1
        compute()

        def replay():
            self.num_replays += 1
            compute()

        return replay
