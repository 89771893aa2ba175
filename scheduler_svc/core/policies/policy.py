"""What a policy is: it ranks each request, and may keep accounts of what was served.

Sequences are compared by a *sort key* of four parts, smaller first:

    level        of the rank: fixed when the request is submitted
    num_served   of the account that the sequence belongs to; the only part that may change
    key          of the rank: fixed when the request is submitted
    seq_id       among equals, the sequence that was submitted first

Because all that may change is one number for each account, the queue never sorts again: it holds a
heap for each level and account.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypeAlias

from scheduler_svc.core.request import Request, SeqId

Key: TypeAlias = tuple[float, ...]

SortKey: TypeAlias = tuple[Key, float, Key, SeqId]
"""The order of a sequence at one moment: level, num_served, key, and its own number."""


@dataclass(frozen=True, slots=True)
class Rank:
    """The order of the sequences of one request; never changes, not even by preemption."""

    key: Key
    """Their order within level and account. Of one length and without NaN throughout a policy."""
    account: str = ""
    """The account whose `Policy.num_served` decides within a level."""
    level: Key = ()
    """Compared before everything else. As `key`."""


class Policy(ABC):
    """The order of one scheduler core's sequences.

    Deterministic: what it answers depends on its constructor's arguments and on the calls so far,
    in their order. It reads no clock and draws no random number; a recorded core could not be
    replayed otherwise. Constructor arguments are of type int, float or str, and have names.
    """

    has_accounts = False
    """Whether sequences are of different accounts; if not, only `rank` is ever called."""

    @abstractmethod
    def rank(self, request: Request, arrived: float) -> Rank:
        """Return the rank of a request's sequences.

        Args:
            request: The request as its router submitted it.
            arrived: When that was. `request.deadline` is on the same clock, in seconds.
        """

    def num_served(self, account: str) -> float:  # noqa: ARG002
        """Return how much an account has been served; the least goes first within a level.

        It may change in `charge` and `began_waiting` only.
        """
        return 0.0

    def began_waiting(self, account: str) -> None:  # noqa: B027
        """Called when the first sequence of an account waits."""

    def stopped_waiting(self, account: str) -> None:  # noqa: B027
        """Called when no sequence of an account waits any more."""

    def charge(self, account: str, num_prompt_tokens: int, num_output_tokens: int) -> None:  # noqa: B027
        """Charge an account for what was computed for it.

        Prompt tokens found in the prefix cache are not charged, nor is what is computed again after
        a preemption.
        """


def sort_key(policy: Policy, rank: Rank, seq_id: SeqId) -> SortKey:
    """Return the order of a sequence now."""
    return (rank.level, policy.num_served(rank.account), rank.key, seq_id)
