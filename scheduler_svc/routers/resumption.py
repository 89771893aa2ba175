"""Requests that may be resumed: who owns each, what came of it, and when it is given up.

The core knows a sequence by the stream that it was submitted on, for as long as it lives. A request
that is resumed through another stream stays what it is there: only its news make a detour. So
nothing is computed again, and nothing pauses.
"""

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from contract.errors import (
    AbortedError,
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    QuireError,
    TooBusyError,
)
from contract.packing import pack_int32, unpack_int32, unpack_uint64
from quire.v1 import scheduler_pb2
from scheduler_svc.core.request import Request, SeqKey, SourceId
from scheduler_svc.routers.resumable_request import KeptRequest
from scheduler_svc.routers.stream import RouterStream
from scheduler_svc.wire.router import merge_step_outputs, refused_to_proto, renamed_part

_MAX_UNREAD = 16
"""Steps whose news wait to be taken in together, which costs little more than taking in one."""
_MAX_UNREAD_BYTES = 1 << 20
_MAX_FIRST_SEQ_KEY = 2**64 - 64


@dataclass(slots=True)
class _Source:
    """A stream, open or gone, on which requests were submitted that are kept."""

    key_to_output: dict[int, tuple[KeptRequest, int]] = field(default_factory=dict)
    """By sequence key: its request and output index."""
    unread: list[scheduler_pb2.StepOutput] = field(default_factory=list)
    """News that is not taken in yet."""
    num_unread_bytes: int = 0
    detours: dict[RouterStream, dict[int, int]] = field(default_factory=dict)
    """Who else hears of which sequences, and what they call them."""


class KeptRequests:
    """Every request that was submitted with a `resume_record`, until its grace period is over.

    It has an owner, the stream that submitted or last resumed it, or none. It is given up `grace_s`
    after it lost its owner, or has ended. `now` is always on one clock, that of the deadlines.
    """

    def __init__(self, *, grace_s: float, max_bytes: int) -> None:
        """A grace of 0: none is kept.

        Beyond `max_bytes` those that have ended, and then those without owner, are given up early,
        oldest first; while what remains takes more, no more are kept.
        """
        self.grace_s = grace_s
        self._max_bytes = max_bytes
        self._requests: dict[tuple[str, str], KeptRequest] = {}
        """By tenant and id, oldest first."""
        self._num_bytes = 0
        """That they take, as of the last `give_up`, and what came since."""
        self._sources: dict[SourceId, _Source] = {}
        self._resumed: dict[RouterStream, dict[int, tuple[SourceId, SeqKey]]] = {}
        """Which sequences are whose, of those that streams have resumed; by their own keys."""

    def __len__(self) -> int:
        return len(self._requests)

    # --- what routers want ----------------------------------------------------------------------

    def keep(
        self, request: Request, submit: scheduler_pb2.Submit, stream: RouterStream
    ) -> tuple[SourceId, list[SeqKey]] | None:
        """Keep a request that is about to be submitted.

        Returns:
            The sequences that it takes the place of, to be cancelled: those of the same request,
            before its router lost its stream.

        Raises:
            AlreadyExistsError: It is another router's.
            TooBusyError: Those that are kept take as much memory as they may.
        """
        if not self.grace_s:
            return None
        if self._num_bytes > self._max_bytes:
            raise TooBusyError(
                f"the resumable requests take {self._num_bytes} bytes; the limit is "
                f"{self._max_bytes} (--resume-max-mb)"
            )
        kept = KeptRequest(request, submit, stream)
        before = self._requests.get(kept.name)
        stale = None
        if before is not None:
            self._read(before.source)
            if not before.has_ended and before.owner and before.router_id != stream.router_id:
                raise AlreadyExistsError(
                    f"request_id {request.request_id!r} is live at another router"
                )
            stale = before.source, before.live_seq_keys
            self._forget(before)
        self._requests[kept.name] = kept
        self._num_bytes += kept.num_bytes
        source = self._sources.setdefault(kept.source, _Source())
        for index in range(len(kept.outputs)):
            source.key_to_output[kept.first_seq_key + index] = kept, index
        return stale

    def resume(self, message: scheduler_pb2.Resume, stream: RouterStream, now: float) -> None:
        """Make `stream` the owner of a request, and send it what came of it; tell the one before.

        Raises:
            NotFoundError: This tenant has no such request, or it was given up.
            InvalidArgumentError: The keys are taken.
        """
        kept = self._requests.get((message.tenant, message.request_id))
        if kept is None:
            raise NotFoundError(
                f"request {message.request_id!r} cannot be resumed: it is not known, was not "
                f"resumable, or its grace period of {self.grace_s:g} s is over"
            )
        if message.first_seq_key > _MAX_FIRST_SEQ_KEY:
            raise InvalidArgumentError(
                "first_seq_key",
                f"is {message.first_seq_key}; it must be at most {_MAX_FIRST_SEQ_KEY}",
            )
        self._read(kept.source)
        stream.claim(self._as_called(kept, message.first_seq_key))
        if (before := kept.owner) is not None:
            before.release(self._as_called(kept, kept.owner_seq_key))
            error = AbortedError(f"request {message.request_id!r} was resumed by another call")
            before.refuse(refused_to_proto(kept.owner_seq_key, error))
        self._disown(kept)
        kept.owner, kept.owner_seq_key = stream, message.first_seq_key
        kept.router_id = stream.router_id
        kept.until = now + self.grace_s if kept.has_ended else None
        detour = self._sources[kept.source].detours.setdefault(stream, {})
        resumed = self._resumed.setdefault(stream, {})
        for index in range(len(kept.outputs)):
            key = SeqKey(kept.first_seq_key + index)
            detour[key] = message.first_seq_key + index
            resumed[message.first_seq_key + index] = kept.source, key
        stream.resumed(kept.resumed(message.first_seq_key))

    def leave(self, stream: RouterStream, seq_key: int, now: float) -> bool:
        """Take a request from its owner, whose client has left; False if it is not kept.

        `seq_key` is what the owner calls one of its sequences. If another call has it by now,
        nothing changes.
        """
        if (name := self._in_core(stream, seq_key)) is None:
            return True
        if (kept := self._find(*name)) is None:
            return False
        self._read(kept.source)
        stream.release(self._as_called(kept, kept.owner_seq_key))
        self._orphan(kept, now)
        return True

    def leave_all(self, stream: RouterStream, now: float) -> frozenset[SeqKey] | None:
        """Take all its requests from a stream that has ended.

        Returns:
            The keys that the core must cancel of the stream's own source; None: all of it.
        """
        for kept in list(self._requests.values()):
            if kept.owner is stream:
                self._orphan(kept, now)
        self._resumed.pop(stream, None)
        source = self._sources.get(stream.source)
        if source is None:
            return None
        return stream.live_seq_keys - frozenset(map(SeqKey, source.key_to_output))

    def by_source(
        self, stream: RouterStream, seq_keys: Iterable[int]
    ) -> Mapping[SourceId, list[SeqKey]]:
        """Say what the core calls sequences of a stream; not those that another call has by now."""
        named: dict[SourceId, list[SeqKey]] = {}
        for seq_key in seq_keys:
            if (name := self._in_core(stream, seq_key)) is not None:
                named.setdefault(name[0], []).append(name[1])
        return named

    # --- what comes of them ---------------------------------------------------------------------

    def hear(self, source_id: SourceId, output: scheduler_pb2.StepOutput) -> None:
        """Take the news of a source, and pass it on to who has resumed some of its requests."""
        source = self._sources.get(source_id)
        if source is None:
            return
        for stream, names in source.detours.items():
            if (part := renamed_part(output, names)) is not None:
                stream.deliver(part)
        source.unread.append(output)
        source.num_unread_bytes += output.ByteSize()
        if len(source.unread) >= _MAX_UNREAD or source.num_unread_bytes > _MAX_UNREAD_BYTES:
            self._read(source_id)

    def refuse(self, request: Request, error: QuireError) -> None:
        """Forget a request that is not accepted; tell who has resumed it meanwhile."""
        kept = self._find(request.source, request.first_seq_key)
        if kept is None:
            return
        owner, seq_key = kept.owner, kept.owner_seq_key
        self._forget(kept)
        if owner is not None and (owner.source, seq_key) != (kept.source, kept.first_seq_key):
            owner.release(self._as_called(kept, seq_key))
            owner.refuse(refused_to_proto(seq_key, error))

    def give_up(self, now: float) -> Iterator[tuple[SourceId, list[SeqKey]]]:
        """Forget the requests whose time has come; yield the sequences that are to be cancelled.

        To be called every second or so: only then is it noticed that a request has ended.
        """
        for source_id in list(self._sources):
            self._read(source_id)
        for kept in list(self._requests.values()):
            if kept.until is None and kept.has_ended:
                kept.until = now + self.grace_s
            is_late = kept.owner is None and kept.deadline is not None and kept.deadline <= now
            if is_late or (kept.until is not None and kept.until <= now):
                yield from self._drop(kept)
        self._num_bytes = sum(kept.num_bytes for kept in self._requests.values())
        idle = (kept for kept in self._requests.values() if kept.until is not None)
        for kept in sorted(idle, key=lambda kept: not kept.has_ended):
            if self._num_bytes <= self._max_bytes:
                break
            self._num_bytes -= kept.num_bytes
            yield from self._drop(kept)

    def forget_all(self) -> None:
        """Forget every request: the tokens of a model that is served no more are no text."""
        for kept in list(self._requests.values()):
            self._forget(kept)
        self._num_bytes = 0

    # --- parts ----------------------------------------------------------------------------------

    def _read(self, source_id: SourceId) -> None:
        """Take in the news of a source: work per sequence, not per token."""
        source = self._sources[source_id]
        if not source.unread:
            return
        # What is kept of it is copied: a part of a message keeps all of it alive.
        news = merge_step_outputs(source.unread)
        source.unread, source.num_unread_bytes = [], 0
        find = source.key_to_output.get
        seq_keys = unpack_uint64(news.seq_keys, "seq_keys")
        order = np.argsort(seq_keys, kind="stable")
        keys, starts = np.unique(seq_keys[order], return_index=True)
        token_ids = pack_int32(unpack_int32(news.token_ids, "token_ids")[order])
        bounds = [*(4 * starts).tolist(), len(token_ids)]
        for key, (start, end) in zip(keys.tolist(), pairwise(bounds), strict=True):
            if (found := find(key)) is not None:
                found[0].outputs[found[1]].token_ids += token_ids[start:end]
        for item in news.logprobs:
            if (found := find(int(seq_keys[item.index]))) is not None:
                found[0].hear_logprob(found[1], deepcopy(item.logprob))
        for part in news.prompt_logprobs:
            if (found := find(part.seq_key)) is not None:
                found[0].hear_prompt_logprobs(deepcopy(part))
        for admitted in news.admitted:
            if (found := find(admitted.seq_key)) is not None and found[1] == 0:
                found[0].admitted = found[0].admitted or deepcopy(admitted)
        for pinned in news.pinned:
            if (found := find(pinned.seq_key)) is not None:
                kept = found[0]
                kept.num_pinned_tokens = max(kept.num_pinned_tokens, pinned.num_pinned_tokens)
        for finished in news.finished:
            if (found := find(finished.seq_key)) is not None:
                found[0].outputs[found[1]].end = deepcopy(finished)

    def _in_core(self, stream: RouterStream, seq_key: int) -> tuple[SourceId, SeqKey] | None:
        """Say what the core calls a sequence of a stream; None: another call has it by now.

        Who lost a request may not have heard of it: what it says of it must end nothing.
        """
        if (name := self._resumed.get(stream, {}).get(seq_key)) is not None:
            return name
        kept = self._find(stream.source, seq_key)
        if kept is not None and (kept.owner, kept.owner_seq_key) != (stream, kept.first_seq_key):
            return None
        return stream.source, SeqKey(seq_key)

    def _find(self, source_id: SourceId, key: int) -> KeptRequest | None:
        source = self._sources.get(source_id)
        found = None if source is None else source.key_to_output.get(key)
        return None if found is None else found[0]

    def _as_called(self, kept: KeptRequest, first_seq_key: int) -> list[SeqKey]:
        """Return the live sequences as one who calls output 0 `first_seq_key` does."""
        return [SeqKey(key - kept.first_seq_key + first_seq_key) for key in kept.live_seq_keys]

    def _orphan(self, kept: KeptRequest, now: float) -> None:
        self._disown(kept)
        if kept.until is None:
            kept.until = now + self.grace_s

    def _disown(self, kept: KeptRequest) -> None:
        owner, kept.owner = kept.owner, None
        source = self._sources[kept.source]
        if owner is None or owner not in source.detours:
            return
        detour, resumed = source.detours[owner], self._resumed[owner]
        for index in range(len(kept.outputs)):
            detour.pop(kept.first_seq_key + index, None)
            resumed.pop(kept.owner_seq_key + index, None)
        if not detour:
            del source.detours[owner]

    def _drop(self, kept: KeptRequest) -> Iterator[tuple[SourceId, list[SeqKey]]]:
        """Forget a request that has ended, or that nobody reads; yield what must be cancelled."""
        self._forget(kept)
        if not kept.has_ended:
            yield kept.source, kept.live_seq_keys

    def _forget(self, kept: KeptRequest) -> None:
        self._disown(kept)
        del self._requests[kept.name]
        source = self._sources[kept.source]
        for index in range(len(kept.outputs)):
            del source.key_to_output[kept.first_seq_key + index]
        if not source.key_to_output:
            del self._sources[kept.source]
