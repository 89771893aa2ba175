"""What a policy is: it gives each sequence a place, and may keep accounts of who was served.

Smaller goes first. A sequence's rank has three parts, compared in this order:

    band       fixed when the request is submitted
    debt       of the account that the sequence belongs to; the only part that may change
    key        fixed when the request is submitted

and the sequence that was submitted first goes first among equals. Because all that may change is
one number for each account, the queue never sorts again: it holds a heap for each band and account.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypeAlias

from scheduler_svc.core.request import Request, SeqId

Key: TypeAlias = tuple[float, ...]

Rank: TypeAlias = tuple[Key, float, Key, SeqId]
"""Where a sequence stands at one moment: band, debt, key, and its own number."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the sequences of one request stand; never changes, not even by preemption."""

    key: Key
    """Its order within band and account. Of one length and without NaN throughout a policy."""
    account: str = ""
    """Whose `Policy.debt` decides within a band."""
    band: Key = ()
    """What goes before everything else. As `key`."""


class Policy(ABC):
    """The order of one scheduler core's sequences.

    Deterministic: what it answers depends on its constructor's arguments and on the calls so far,
    in their order. It reads no clock and draws no random number; a recorded core could not be
    replayed otherwise. Constructor arguments are of type int, float or str, and have names.
    """

    has_accounts = False
    """Whether sequences are of different accounts; if not, only `place` is ever called."""

    @abstractmethod
    def place(self, request: Request, arrived: float) -> Place:
        """Return the place of a request's sequences.

        Args:
            request: The request as its router submitted it.
            arrived: When that was. `request.deadline` is on the same clock, in seconds.
        """

    def debt(self, account: str) -> float:  # noqa: ARG002
        """Return what an account has had; the account with the least goes first in a band.

        It may change in `served` and `began_waiting` only.
        """
        return 0.0

    def began_waiting(self, account: str) -> None:  # noqa: B027
        """Learn that an account has a waiting sequence, and had none before."""

    def stopped_waiting(self, account: str) -> None:  # noqa: B027
        """Learn that no sequence of an account waits any more."""

    def served(self, account: str, num_prompt_tokens: int, num_output_tokens: int) -> None:  # noqa: B027
        """Learn what was computed for an account.

        Prompt tokens found in the prefix cache do not count; nor does what is computed again after
        a preemption.
        """


def rank(policy: Policy, place: Place, seq_id: SeqId) -> Rank:
    """Return where a sequence stands now."""
    return (place.band, policy.debt(place.account), place.key, seq_id)
