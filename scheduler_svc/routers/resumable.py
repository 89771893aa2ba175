"""Resumable requests: the outputs so far, the owning stream and the expiry time of each.

In the core a sequence always belongs to the stream on which it was submitted. When another stream
resumes a request, the request is not recomputed and does not pause; only its outputs are sent to
the other stream.
"""

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from contract.codec.packing import pack_int32, pack_uint64, unpack_int32, unpack_uint64
from contract.errors import (
    AbortedError,
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    QuireError,
    TooBusyError,
)
from quire.v1 import common_pb2, scheduler_pb2
from scheduler_svc.core.interface.request import Request, SeqKey, SourceId
from scheduler_svc.routers.stream import RouterStream
from scheduler_svc.wire.router import merge_step_outputs, refused_to_proto, renamed_part

_MAX_UNREAD = 16
"""The outputs of up to this many steps are sorted by sequence together. To sort the outputs of many
steps costs little more than to sort those of one step."""
_MAX_UNREAD_BYTES = 1 << 20
_MAX_FIRST_SEQ_KEY = 2**64 - 64


class _Output:
    """The tokens, log-probabilities and end of one sequence so far."""

    def __init__(self, so_far: scheduler_pb2.OutputSoFar | None) -> None:
        """Begin with `so_far`, the earlier output of a resubmitted sequence, or with nothing."""
        self.token_ids = bytearray(b"" if so_far is None else so_far.token_ids)
        """The tokens as little-endian int32, as in `quire.v1.StepOutput`."""
        self.end: scheduler_pb2.SequenceFinished | None = None
        self.logprobs: list[common_pb2.TokenLogprob] = []
        """One for each token from index `first_logprob` on; empty if the request asks for none."""
        self.first_logprob = len(self.token_ids) // 4
        if so_far is not None and so_far.finished:
            self.end = so_far.end


class ResumableRequest:
    """A resumable request and its outputs so far. Only `ResumableRequests` changes this object."""

    def __init__(self, request: Request, submit: scheduler_pb2.Submit, owner: RouterStream) -> None:
        self.source = request.source
        """The request's source in the core, which stays the same when the owner changes."""
        self.first_seq_key = request.first_seq_key
        self.deadline = request.deadline
        self.router_id = owner.router_id
        """The router of the last owner."""
        self.owner: RouterStream | None = owner
        """The stream that receives the outputs. None: the last owner has left, and no stream has
        resumed the request."""
        self.owner_seq_key = int(request.first_seq_key)
        """The key of output 0 at the owner."""
        self.until: float | None = None
        """When the request expires; None: it has an owner and has not ended."""
        so_fars = submit.outputs or [None] * submit.n
        self.outputs = tuple(_Output(so_far) for so_far in so_fars)
        self.prompt_logprobs: list[scheduler_pb2.SequencePromptLogprobs] = []
        self.admitted: scheduler_pb2.SequenceAdmitted | None = None
        """The message about the first admission of output 0; None: it was not admitted yet."""
        self.num_pinned_tokens = 0
        self._submit = scheduler_pb2.Submit()
        self._submit.CopyFrom(submit)
        self._submit.ClearField("outputs")
        self._num_other_bytes = self._submit.ByteSize()

    @property
    def name(self) -> tuple[str, str]:
        """The request's tenant and id."""
        return self._submit.tenant, self._submit.request_id

    @property
    def has_ended(self) -> bool:
        """Whether all outputs of the request have ended."""
        return all(output.end is not None for output in self.outputs)

    @property
    def live_seq_keys(self) -> list[SeqKey]:
        """The keys that the unfinished sequences have in the core."""
        return [
            SeqKey(self.first_seq_key + index)
            for index, output in enumerate(self.outputs)
            if output.end is None
        ]

    @property
    def num_bytes(self) -> int:
        """An estimate of the memory that this object uses."""
        return self._num_other_bytes + sum(len(output.token_ids) for output in self.outputs)

    def add_logprob(self, index: int, logprob: common_pb2.TokenLogprob) -> None:
        """Store the log-probability of the next token of an output."""
        self.outputs[index].logprobs.append(logprob)
        self._num_other_bytes += logprob.ByteSize()

    def add_prompt_logprobs(self, part: scheduler_pb2.SequencePromptLogprobs) -> None:
        """Store the log-probabilities of a part of the prompt."""
        self.prompt_logprobs.append(part)
        self._num_other_bytes += part.ByteSize()

    def to_proto(self, first_seq_key: int) -> scheduler_pb2.Resumed:
        """Return the request and all outputs, with `first_seq_key` as the key of output 0."""
        so_far = scheduler_pb2.StepOutput(
            seq_keys=b"".join(
                pack_uint64([first_seq_key + index]) * (len(output.token_ids) // 4)
                for index, output in enumerate(self.outputs)
            ),
            token_ids=b"".join(bytes(output.token_ids) for output in self.outputs),
        )
        num_tokens = 0
        for index, output in enumerate(self.outputs):
            for place, logprob in enumerate(output.logprobs, num_tokens + output.first_logprob):
                so_far.logprobs.add(index=place, logprob=logprob)
            num_tokens += len(output.token_ids) // 4
            if output.end is not None:
                so_far.finished.add().CopyFrom(output.end)
                so_far.finished[-1].seq_key = first_seq_key + index
        for part in self.prompt_logprobs:
            so_far.prompt_logprobs.add().CopyFrom(part)
            so_far.prompt_logprobs[-1].seq_key = first_seq_key
        if self.admitted is not None:
            so_far.admitted.add().CopyFrom(self.admitted)
            so_far.admitted[-1].seq_key = first_seq_key
        if self.num_pinned_tokens:
            so_far.pinned.add(seq_key=first_seq_key, num_pinned_tokens=self.num_pinned_tokens)
        resumed = scheduler_pb2.Resumed(submit=self._submit, so_far=so_far)
        resumed.submit.first_seq_key = first_seq_key
        return resumed


@dataclass(slots=True)
class _Source:
    """A stream, open or closed, on which resumable requests were submitted."""

    key_to_output: dict[int, tuple[ResumableRequest, int]] = field(default_factory=dict)
    """Maps a sequence key to the request and the output index."""
    unread: list[scheduler_pb2.StepOutput] = field(default_factory=list)
    """Outputs that have not been sorted by sequence yet."""
    num_unread_bytes: int = 0
    redirects: dict[RouterStream, dict[int, int]] = field(default_factory=dict)
    """The new keys of the sequences that other streams have resumed. For each of these streams, a
    map leads from a sequence's key on this source's stream to its key on the resuming stream."""


class ResumableRequests:
    """The requests submitted with a `resume_record`, until their grace periods end.

    The stream that submitted or last resumed a request owns the request, until the stream ends or
    the client leaves. A request expires `grace_s` after it has lost its owner or has ended. The
    argument `now` of a method is a time on the clock of the requests' deadlines.
    """

    def __init__(self, *, grace_s: float, max_bytes: int) -> None:
        """Make an empty collection; if `grace_s` is 0, no request is resumable.

        If the requests use more than `max_bytes`, some expire early: the requests that have ended,
        then those without an owner, and of each kind the oldest first. Unfinished requests with an
        owner never expire early. If these requests use more than `max_bytes`, new ones are refused.
        """
        self.grace_s = grace_s
        self._max_bytes = max_bytes
        self._requests: dict[tuple[str, str], ResumableRequest] = {}
        """The requests by tenant and id, oldest first."""
        self._num_bytes = 0
        """The size of all requests at the last `expire`, plus the size of requests added since."""
        self._sources: dict[SourceId, _Source] = {}
        self._resumed: dict[RouterStream, dict[int, tuple[SourceId, SeqKey]]] = {}
        """For each stream that has resumed requests, a map of the requests' sequences. It leads
        from a sequence's key on that stream to the source id and the key that the core has for it.
        """

    def __len__(self) -> int:
        return len(self._requests)

    # --- routers' messages ----------------------------------------------------------------------

    def add(
        self, request: Request, submit: scheduler_pb2.Submit, stream: RouterStream
    ) -> tuple[SourceId, list[SeqKey]] | None:
        """Add a request that is about to be submitted.

        Returns:
            The sequences that the caller must cancel: those of an earlier request with the same
            tenant and id, which the new request replaces. None: there is no earlier request.

        Raises:
            AlreadyExistsError: The request is live at another router.
            TooBusyError: The memory for resumable requests is used up.
        """
        if not self.grace_s:
            return None
        if self._num_bytes > self._max_bytes:
            raise TooBusyError(
                f"resumable requests use {self._num_bytes} bytes; the limit is "
                f"{self._max_bytes} (--resume-max-mb)"
            )
        kept = ResumableRequest(request, submit, stream)
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
        """Make `stream` the owner of a request.

        All outputs so far are sent to `stream`. If the request has another owner, an error is sent
        to that owner.

        Raises:
            NotFoundError: The tenant has no such request, or it has expired.
            InvalidArgumentError: `first_seq_key` is too large, or a live sequence of `stream` has
                one of the keys that the request would get.
        """
        kept = self._requests.get((message.tenant, message.request_id))
        if kept is None:
            raise NotFoundError(
                f"request {message.request_id!r} cannot be resumed: it is unknown, was not "
                f"resumable, or its grace period of {self.grace_s:g} s has ended"
            )
        if message.first_seq_key > _MAX_FIRST_SEQ_KEY:
            raise InvalidArgumentError(
                "first_seq_key",
                f"is {message.first_seq_key}; it must be at most {_MAX_FIRST_SEQ_KEY}",
            )
        self._read(kept.source)
        stream.claim(self._keys_from(kept, message.first_seq_key))
        if (before := kept.owner) is not None:
            before.release(self._keys_from(kept, kept.owner_seq_key))
            error = AbortedError(f"request {message.request_id!r} was resumed by another call")
            before.refuse(refused_to_proto(kept.owner_seq_key, error))
        self._disown(kept)
        kept.owner, kept.owner_seq_key = stream, message.first_seq_key
        kept.router_id = stream.router_id
        kept.until = now + self.grace_s if kept.has_ended else None
        redirect = self._sources[kept.source].redirects.setdefault(stream, {})
        resumed = self._resumed.setdefault(stream, {})
        for index in range(len(kept.outputs)):
            key = SeqKey(kept.first_seq_key + index)
            redirect[key] = message.first_seq_key + index
            resumed[message.first_seq_key + index] = kept.source, key
        stream.send_resumed(kept.to_proto(message.first_seq_key))

    def leave(self, stream: RouterStream, seq_key: int, now: float) -> bool:
        """Remove the owner of a request, because the client has left.

        If another call has already resumed the request, nothing changes.

        Args:
            stream: The owner.
            seq_key: The key that one of the request's sequences has at the owner.
            now: The time.

        Returns:
            Whether the request is resumable. If not, the caller must cancel its sequences.
        """
        if (name := self._in_core(stream, seq_key)) is None:
            return True
        if (kept := self._find(*name)) is None:
            return False
        self._read(kept.source)
        stream.release(self._keys_from(kept, kept.owner_seq_key))
        self._orphan(kept, now)
        return True

    def leave_all(self, stream: RouterStream, now: float) -> frozenset[SeqKey] | None:
        """Remove the owner of all requests that `stream` owns, because the stream has ended.

        Returns:
            The keys of the sequences to cancel; None: cancel all sequences of the stream.
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
        """Return, by source, the keys that the given sequences have in the core.

        Sequences that another stream has resumed are left out.
        """
        named: dict[SourceId, list[SeqKey]] = {}
        for seq_key in seq_keys:
            if (name := self._in_core(stream, seq_key)) is not None:
                named.setdefault(name[0], []).append(name[1])
        return named

    # --- outputs and ends -----------------------------------------------------------------------

    def on_output(self, source_id: SourceId, output: scheduler_pb2.StepOutput) -> None:
        """Store the outputs of a source; forward the parts that other streams have resumed."""
        source = self._sources.get(source_id)
        if source is None:
            return
        for stream, names in source.redirects.items():
            if (part := renamed_part(output, names)) is not None:
                stream.deliver(part)
        source.unread.append(output)
        source.num_unread_bytes += output.ByteSize()
        if len(source.unread) >= _MAX_UNREAD or source.num_unread_bytes > _MAX_UNREAD_BYTES:
            self._read(source_id)

    def refuse(self, request: Request, error: QuireError) -> None:
        """Forget a refused request; if a stream has resumed it, send the refusal to that stream."""
        kept = self._find(request.source, request.first_seq_key)
        if kept is None:
            return
        owner, seq_key = kept.owner, kept.owner_seq_key
        self._forget(kept)
        if owner is not None and (owner.source, seq_key) != (kept.source, kept.first_seq_key):
            owner.release(self._keys_from(kept, seq_key))
            owner.refuse(refused_to_proto(seq_key, error))

    def expire(self, now: float) -> Iterator[tuple[SourceId, list[SeqKey]]]:
        """Remove expired requests; yield the sequences that the caller must cancel.

        Call this about every second, because only this method notices that a request has ended.
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
        """Forget all requests, because their model is no longer served."""
        for kept in list(self._requests.values()):
            self._forget(kept)
        self._num_bytes = 0

    # --- parts ----------------------------------------------------------------------------------

    def _read(self, source_id: SourceId) -> None:
        """Sort the unread outputs of a source by sequence, with array operations."""
        source = self._sources[source_id]
        if not source.unread:
            return
        # Copy the parts of messages, because a part keeps the memory of its whole message alive.
        merged = merge_step_outputs(source.unread)
        source.unread, source.num_unread_bytes = [], 0
        find = source.key_to_output.get
        seq_keys = unpack_uint64(merged.seq_keys, "seq_keys")
        order = np.argsort(seq_keys, kind="stable")
        keys, starts = np.unique(seq_keys[order], return_index=True)
        token_ids = pack_int32(unpack_int32(merged.token_ids, "token_ids")[order])
        bounds = [*(4 * starts).tolist(), len(token_ids)]
        for key, (start, end) in zip(keys.tolist(), pairwise(bounds), strict=True):
            if (found := find(key)) is not None:
                found[0].outputs[found[1]].token_ids += token_ids[start:end]
        for item in merged.logprobs:
            if (found := find(int(seq_keys[item.index]))) is not None:
                found[0].add_logprob(found[1], deepcopy(item.logprob))
        for part in merged.prompt_logprobs:
            if (found := find(part.seq_key)) is not None:
                found[0].add_prompt_logprobs(deepcopy(part))
        for admitted in merged.admitted:
            if (found := find(admitted.seq_key)) is not None and found[1] == 0:
                found[0].admitted = found[0].admitted or deepcopy(admitted)
        for pinned in merged.pinned:
            if (found := find(pinned.seq_key)) is not None:
                kept = found[0]
                kept.num_pinned_tokens = max(kept.num_pinned_tokens, pinned.num_pinned_tokens)
        for finished in merged.finished:
            if (found := find(finished.seq_key)) is not None:
                found[0].outputs[found[1]].end = deepcopy(finished)

    def _in_core(self, stream: RouterStream, seq_key: int) -> tuple[SourceId, SeqKey] | None:
        """Return the source and key that a sequence has in the core.

        None: another stream has resumed the sequence's request. `stream` may not know yet that it
        has lost the request, and the messages of `stream` must not end the request.
        """
        if (name := self._resumed.get(stream, {}).get(seq_key)) is not None:
            return name
        kept = self._find(stream.source, seq_key)
        if kept is not None and (kept.owner, kept.owner_seq_key) != (stream, kept.first_seq_key):
            return None
        return stream.source, SeqKey(seq_key)

    def _find(self, source_id: SourceId, key: int) -> ResumableRequest | None:
        source = self._sources.get(source_id)
        found = None if source is None else source.key_to_output.get(key)
        return None if found is None else found[0]

    def _keys_from(self, kept: ResumableRequest, first_seq_key: int) -> list[SeqKey]:
        """Return the keys that a request's live sequences have on a stream.

        `first_seq_key` is the key of output 0 on this stream.
        """
        return [SeqKey(key - kept.first_seq_key + first_seq_key) for key in kept.live_seq_keys]

    def _orphan(self, kept: ResumableRequest, now: float) -> None:
        self._disown(kept)
        if kept.until is None:
            kept.until = now + self.grace_s

    def _disown(self, kept: ResumableRequest) -> None:
        owner, kept.owner = kept.owner, None
        source = self._sources[kept.source]
        if owner is None or owner not in source.redirects:
            return
        redirect, resumed = source.redirects[owner], self._resumed[owner]
        for index in range(len(kept.outputs)):
            redirect.pop(kept.first_seq_key + index, None)
            resumed.pop(kept.owner_seq_key + index, None)
        if not redirect:
            del source.redirects[owner]

    def _drop(self, kept: ResumableRequest) -> Iterator[tuple[SourceId, list[SeqKey]]]:
        """Forget a request that has ended or has no owner; yield the sequences to cancel."""
        self._forget(kept)
        if not kept.has_ended:
            yield kept.source, kept.live_seq_keys

    def _forget(self, kept: ResumableRequest) -> None:
        self._disown(kept)
        del self._requests[kept.name]
        source = self._sources[kept.source]
        for index in range(len(kept.outputs)):
            del source.key_to_output[kept.first_seq_key + index]
        if not source.key_to_output:
            del self._sources[kept.source]
