"""Pins: blocks of prompts, and of their outputs, that stay in the prefix cache for a given time.

A pin is a reference to a device block. Two limits apply: all pins together hold at most the
fraction `max_pinned_share` of the blocks, and the pins of one tenant at most the fraction
`max_tenant_pinned_share`. If several requests pin the same block, its pin belongs to the request
that asked for the latest end. The pins of a request can be dropped by the request's id.

Pins may be dropped before their end; the pin that would end first is dropped first. Without a host
tier, pins are dropped early only if no sequence could run otherwise. With a host tier, pins are
dropped as soon as a sequence would wait for pinned blocks; the content of the blocks is demoted to
the host, and promoted again when a prompt needs it.

Plans tell the worker the hashes of pinned blocks, so that a later scheduler can restore the pins.
The worker is not told which pins were dropped early, because a later scheduler may have room for
these pins. The worker does not know the tenants of pins, so restored pins do not count towards the
limit of any tenant.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, TypeAlias

from contract.hashing import BlockHash
from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.interface.events import Pinned
from scheduler_svc.core.sequence import RUNNING
from scheduler_svc.core.sequence import Sequence as Seq
from scheduler_svc.core.space.blocks import BlockPool, DeviceBlockId
from scheduler_svc.core.space.kv_groups import KvGroups
from scheduler_svc.core.space.marked_heap import MarkedHeap

Owner: TypeAlias = tuple[str, str]
"""The tenant and the id of a request."""


class Pins:
    """The pinned blocks and the end of each pin. Only this class sets and drops pins."""

    def __init__(
        self, config: SchedulerConfig, groups: KvGroups, pool: BlockPool[DeviceBlockId]
    ) -> None:
        self._groups = groups
        self._pool = pool
        self._block_size = config.block_size
        self._max_share = config.max_pinned_share
        self._max_tenant_share = config.max_tenant_pinned_share
        self.go_down: Final = config.num_host_blocks > 0
        """Whether the content of a block can be demoted to the host when its pin is dropped."""
        # The tenant for which each block is pinned; only for requests that have a tenant.
        self._tenants: dict[DeviceBlockId, str] = {}
        self._num_of: Counter[str] = Counter()
        # The owner of a pin is the request that set its end; restored pins have no known owner.
        self._owners: dict[DeviceBlockId, Owner] = {}
        self._owned: dict[Owner, set[DeviceBlockId]] = {}
        # For each block, the latest end that a request other than the owner asked for, and who.
        self._others: dict[DeviceBlockId, tuple[float, Owner]] = {}
        # For each block: its pin's end, and the block's negative index, which orders equal ends.
        self._ends: dict[DeviceBlockId, tuple[float, int]] = {}
        self._by_end: MarkedHeap[DeviceBlockId] = MarkedHeap()
        self._loading: list[tuple[Seq, float]] = []  # prompts to pin after swap-ins, with ends
        self._pinned: tuple[Pinned, ...] = ()  # not reported to the sources yet
        self._unsent: list[tuple[BlockHash, float]] = []  # not sent to the worker yet
        self._next_end = float("inf")  # no pin ends before this time
        self._now = 0.0  # when the last step was planned

    @property
    def _max_blocks(self) -> int:
        return int(self._max_share * self._pool.num_usable)

    def _has_room(self, tenant: str) -> bool:
        if len(self._ends) >= self._max_blocks:
            return False
        return not tenant or self._num_of[tenant] < self._max_of_tenant

    @property
    def _max_of_tenant(self) -> int:
        return int(self._max_tenant_share * self._pool.num_usable)

    def num_of(self, tenant: str) -> int:
        """Return how many blocks are pinned for a tenant."""
        return self._num_of[tenant]

    def __len__(self) -> int:
        return len(self._ends)

    def __contains__(self, block: DeviceBlockId) -> bool:
        return block in self._ends

    def __iter__(self) -> Iterator[DeviceBlockId]:
        return iter(self._ends)

    @property
    def ends(self) -> Mapping[DeviceBlockId, tuple[float, int]]:
        """Maps a pinned block to its pin's end, and to a number that orders pins of equal end."""
        return self._ends

    @property
    def tenants(self) -> Mapping[DeviceBlockId, str]:
        """Maps each block that is pinned for a tenant to this tenant."""
        return self._tenants

    @property
    def owned(self) -> Mapping[Owner, AbstractSet[DeviceBlockId]]:
        """The pinned blocks of each request, without blocks whose request is unknown."""
        return self._owned

    @property
    def by_end(self) -> MarkedHeap[DeviceBlockId]:
        """The pinned blocks, ordered by the time at which their pins end; read-only."""
        return self._by_end

    def on_prompt_computed(self, seq: Seq, now: float) -> None:
        """Pin the full blocks of a prompt, up to the limits, if the prompt's request asks for pins.

        If swap-ins of the prompt are not confirmed yet, `on_loads_confirmed` pins it later. In a
        beam search, only the leader pins the prompt.
        """
        is_leader = seq.group is None or seq is seq.group.leader
        if seq.request.cache_pin_s is not None and is_leader:
            self._loading.append((seq, now + seq.request.cache_pin_s))
            self.on_loads_confirmed()

    def on_loads_confirmed(self) -> None:
        """Pin the prompts that had to wait for swap-ins, if all their swap-ins have succeeded."""
        loading, self._loading = self._loading, []
        for seq, until in loading:
            if seq.status not in RUNNING:
                continue
            if seq.loading_block_ids:
                self._loading.append((seq, until))
            else:
                hashes = seq.block_hashes[: seq.num_prompt_tokens // self._block_size]
                owner = seq.request.tenant, seq.request.request_id
                num_tokens = self._pin_prefix(hashes, until, owner) * self._block_size
                self._pinned += (Pinned(seq.request.source, seq.seq_key, num_tokens),)

    def on_completed(self, seq: Seq) -> None:
        """Pin the published blocks of a completed sequence, if its request asks for pins and n = 1.

        In a conversation, the next request's prompt begins with the prompt and output of this
        sequence. So the pins of the prompt's blocks are extended, too.
        """
        if seq.request.cache_pin_s is not None and seq.request.n == 1 and seq.group is None:
            owner = seq.request.tenant, seq.request.request_id
            self._pin_prefix(seq.block_hashes, self._now + seq.request.cache_pin_s, owner)

    def take_pinned(self) -> tuple[Pinned, ...]:
        """Return the prompts pinned since the last call."""
        pinned, self._pinned = self._pinned, ()
        return pinned

    def take_unsent(self, now: float) -> tuple[tuple[BlockHash, float], ...]:
        """Return the hash, and the seconds until the pin ends, of each newly pinned block.

        Newly pinned blocks are those pinned since the last call.
        """
        if not self._unsent:  # true in almost every step
            return ()
        unsent, self._unsent = self._unsent, []
        return tuple((name, until - now) for name, until in unsent if until > now)

    def restore(self, pins: Iterable[tuple[BlockHash, float]], now: float) -> None:
        """Restore an earlier scheduler's pins whose blocks are cached, up to `max_pinned_share`.

        Args:
            pins: The hash of each pinned block, and the seconds until its pin ends. The hashes of a
                prompt are in the order of the prompt's blocks.
            now: The time.
        """
        for place, (name, left_s) in enumerate(pins):
            for block in self._pool.find([name]):
                self._pool.share([block])
                self._set_end(block, now + left_s, -place)
        self.keep_within_share()

    def expire(self, now: float) -> None:
        """Drop the pins that have ended."""
        self._now = now
        if now < self._next_end:
            return
        while (first := self._by_end.first()) is not None and first[0][0] <= now:
            self._let_go(first[1])
        self._next_end = first[0][0] if first is not None else float("inf")

    def give_up(self, count: int) -> bool:
        """Drop up to `count` pins, those that end first; return False if no block was pinned.

        The blocks of dropped pins become available, except those that have other holders.
        """
        any_pinned = bool(self._ends)
        for _ in range(count):
            if (first := self._by_end.first()) is None:
                break
            self._let_go(first[1])
        return any_pinned

    def unpin(self, tenant: str, request_id: str) -> None:
        """Drop the pins of a request.

        A pin that another request asked for, too, stays until the end set by that other request.
        """
        owner = tenant, request_id
        self._loading = [
            (seq, until)
            for seq, until in self._loading
            if (seq.request.tenant, seq.request.request_id) != owner
        ]
        self._others = {block: each for block, each in self._others.items() if each[1] != owner}
        for block in sorted(self._owned.get(owner, ())):
            if (other := self._others.pop(block, None)) is None:
                self._let_go(block)
                continue
            _, place = self._ends[block]
            self._disown(block)
            until, left_owner = other
            self._own(block, left_owner)
            self._set_end(block, until, place)

    def keep_within_share(self) -> None:
        """Drop the pins that exceed `max_pinned_share`; the pool may have shrunk."""
        self.give_up(len(self._ends) - self._max_blocks)

    def forget(self, blocks: Iterable[DeviceBlockId]) -> None:
        """Drop the pins of `blocks`, whose content may be wrong."""
        for block in blocks:
            if block in self._ends:
                self._let_go(block)

    def rename(self, src: DeviceBlockId, dst: DeviceBlockId) -> None:
        """Record that the content of a pinned block has moved to another block."""
        end, place = self._ends.pop(src)
        self._by_end.discard(src)
        self._set_end(dst, end, place)
        if (owner := self._disown(src)) is not None:
            self._own(dst, owner)
        if (other := self._others.pop(src, None)) is not None:
            self._others[dst] = other
        if (tenant := self._tenants.pop(src, None)) is not None:
            self._tenants[dst] = tenant

    def _pin_prefix(self, chain: Sequence[BlockHash], until: float, owner: Owner) -> int:
        """Pin the blocks of a prompt; return how many of its block indices are pinned.

        With several KV groups or windows, pin either all blocks that later tokens read, or none.
        """
        if self._groups.is_plain:
            return self._pin(chain, until, owner)
        places = self._groups.kept(len(chain) * self._block_size)
        names = self._groups.names(chain, places)
        num_new = sum(block not in self._ends for block in self._pool.find(names))
        if len(self._pool.find(names)) < len(names):
            return 0
        if len(self._ends) + num_new > self._max_blocks:
            return 0
        tenant, _ = owner
        if tenant and self._num_of[tenant] + num_new > self._max_of_tenant:
            return 0
        self._pin(names, until, owner)
        return len(chain)

    def _pin(self, hashes: Sequence[BlockHash], until: float, owner: Owner) -> int:
        """Pin the blocks of `hashes` in order, or extend their pins; return how many are pinned.

        Stop at the first block that is not cached, or for which the limits leave no room.
        """
        tenant, _ = owner
        blocks = self._pool.find(hashes)
        for index, block in enumerate(blocks):
            if (old := self._ends.get(block)) is None:
                if not self._has_room(tenant):
                    return index
                self._pool.share([block])
                if tenant:
                    self._tenants[block] = tenant
                    self._num_of[tenant] += 1
            elif old[0] >= until:
                if self._owners.get(block) != owner:
                    self._add_other(block, until, owner)
                continue
            elif (former := self._disown(block)) not in (None, owner):
                self._add_other(block, old[0], former)
            self._own(block, owner)
            # A block's pin ends no sooner than the pins of the blocks that continue it.
            self._set_end(block, until, -index)
            self._unsent.append((hashes[index], until))
        return len(blocks)

    def _set_end(self, block: DeviceBlockId, until: float, place: int) -> None:
        self._next_end = min(self._next_end, until)
        self._ends[block] = until, place
        self._by_end.discard(block)
        self._by_end.push((until,), block, place)

    def _add_other(self, block: DeviceBlockId, until: float, owner: Owner) -> None:
        if (known := self._others.get(block)) is None or known[0] < until:
            self._others[block] = until, owner

    def _own(self, block: DeviceBlockId, owner: Owner) -> None:
        self._owners[block] = owner
        self._owned.setdefault(owner, set()).add(block)

    def _disown(self, block: DeviceBlockId) -> Owner | None:
        if (owner := self._owners.pop(block, None)) is not None:
            self._owned[owner].remove(block)
            if not self._owned[owner]:
                del self._owned[owner]
        return owner

    def _let_go(self, block: DeviceBlockId) -> None:
        del self._ends[block]
        self._by_end.discard(block)
        self._disown(block)
        self._others.pop(block, None)
        if (tenant := self._tenants.pop(block, None)) is not None:
            self._num_of[tenant] -= 1
            if not self._num_of[tenant]:
                del self._num_of[tenant]
        self._pool.drop([block])
