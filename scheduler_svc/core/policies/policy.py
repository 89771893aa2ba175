"""The interface of policies: they rank requests, and may keep accounts of served tokens.

Sequences are compared by a *sort key* of four parts, smaller first:

    level        comes from the rank, and is fixed when the request is submitted
    num_served   comes from the sequence's account, and is the only part that may change
    key          comes from the rank, and is fixed when the request is submitted
    seq_id       breaks ties: the sequence that was submitted first goes first

Because only one number per account may change, the queue never has to sort again: it keeps one heap
for each level and account.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from scheduler_svc.core.interface.request import Request, SeqId

Key: TypeAlias = tuple[float, ...]

SortKey: TypeAlias = tuple[Key, float, Key, SeqId]
"""What a sequence is sorted by at one moment: level, num_served, key and seq_id."""


@dataclass(frozen=True, slots=True)
class Rank:
    """What a policy decides, once, about a request's sequences; no preemption changes it."""

    key: Key
    """Orders sequences of the same level and account. All keys of a policy have the same length,
    and none has a NaN."""
    account: str = ""
    """The account to charge, such as a tenant. Within a level, the least served account goes first
    (`Policy.num_served`)."""
    level: Key = ()
    """Compared before `num_served` and `key`. The requirements are those of `key`."""


class Policy(ABC):
    """The order of one scheduler core's sequences.

    A policy is deterministic: its results depend only on the constructor's arguments and on the
    earlier calls of its methods. A policy reads no clock and draws no random numbers; otherwise
    recorded cores could not be replayed. Constructor arguments are int, float or str, and are
    passed by name.
    """

    has_accounts = False
    """Whether sequences belong to different accounts; if false, `charge` is never called."""

    @abstractmethod
    def rank(self, request: Request, arrived: float) -> Rank:
        """Return the rank of a request's sequences.

        Args:
            request: The request as its router submitted it.
            arrived: When the request was submitted, in seconds on the clock of `request.deadline`.
        """

    def num_served(self, account: str) -> float:  # noqa: ARG002
        """Return how much an account was served; in a level, the least served account goes first.

        Only calls of `charge` and `began_waiting` may change the result.
        """
        return 0.0

    def accounts(self) -> Mapping[str, float]:
        """Return the values that `restore` needs to continue the accounts in another core."""
        return {}

    def restore(self, accounts: Mapping[str, float]) -> None:  # noqa: B027
        """Continue the accounts of an earlier core; this is called before all other methods."""

    def began_waiting(self, account: str) -> None:  # noqa: B027
        """Called when a sequence begins to wait while no other sequence of its account waits."""

    def stopped_waiting(self, account: str) -> None:  # noqa: B027
        """Called when the last waiting sequence of an account stops waiting."""

    def charge(self, account: str, num_prompt_tokens: int, num_output_tokens: int) -> None:  # noqa: B027
        """Charge an account for computed tokens.

        Prompt tokens from the prefix cache, and tokens that are computed again after a preemption,
        are not charged.
        """


def background(request: Request) -> Key:
    """Return a level that puts requests of the lowest priority after all others.

    All requests from `/v1/batches` have the lowest priority. If a policy uses this level, these
    requests start after all others and are preempted first. The policy `priority` and its
    combinations do not use this level: waiting raises the priority of these requests like that of
    any other request.
    """
    return (float(request.is_background),)


def sort_key(policy: Policy, rank: Rank, seq_id: SeqId) -> SortKey:
    """Return the current sort key of a sequence."""
    return (rank.level, policy.num_served(rank.account), rank.key, seq_id)
