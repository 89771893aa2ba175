"""A rank of a model on several devices, for tests of what one rank holds."""


class LoneRank:
    """One of several ranks, without the others."""

    def __init__(self, place):
        self.place = place

    def summed(self, part):
        return part

    def joined(self, part, _):
        return part
