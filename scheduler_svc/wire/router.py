"""Makes the messages to routers: the welcome, refusals, the adapters, and the core's events.

The tokens of a step are converted as whole arrays. Only log-probabilities, vectors, admissions,
pins and ends of sequences are converted one by one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from contract.arrays import Int32Array
from contract.codec.info import adapter_to_proto, model_info_to_proto
from contract.codec.outputs import FINISH_REASON_TO_PROTO
from contract.codec.packing import pack_int32, pack_uint64, unpack_int32, unpack_uint64
from contract.codec.step import token_logprob_to_proto
from contract.errors import QuireError, TooBusyError
from contract.info import ModelInfo
from contract.lora import LoraAdapter
from quire.v1 import scheduler_pb2, worker_pb2
from scheduler_svc.core.interface.events import Finished, StepEvents
from scheduler_svc.core.interface.request import SeqKey, SourceId

OwnedVector: TypeAlias = tuple[SourceId, SeqKey, bytes]
"""A sequence's source and key, and its embedding or score as little-endian float32."""


def welcome_to_proto(
    epoch: int,
    model: ModelInfo,
    resume_grace_s: float,
    superseded_epochs: Iterable[int],
    max_waiting: int,
) -> scheduler_pb2.ConnectResponse:
    """Make the welcome message, which answers a router's hello."""
    return scheduler_pb2.ConnectResponse(
        welcome=scheduler_pb2.SchedulerWelcome(
            epoch=epoch,
            resume_grace_s=resume_grace_s,
            model=model_info_to_proto(model),
            superseded_epochs=superseded_epochs,
            max_waiting=max_waiting,
            wants_heartbeats=True,
        )
    )


def adapters_to_proto(adapters: Iterable[LoraAdapter]) -> scheduler_pb2.StepOutput:
    """Make the message with the list of adapters that requests may use from now on."""
    return scheduler_pb2.StepOutput(
        adapters=scheduler_pb2.ServedAdapters(adapters=map(adapter_to_proto, adapters))
    )


def refused_to_proto(first_seq_key: int, error: QuireError) -> scheduler_pb2.Refused:
    """Make the message that refuses the request with the key `first_seq_key`."""
    refused = scheduler_pb2.Refused(
        first_seq_key=first_seq_key, code=error.code.value[0], message=str(error)
    )
    if isinstance(error, TooBusyError):
        refused.retry_after_s = error.retry_after_s
    return refused


def vectors_of(
    pooled: Iterable[worker_pb2.PooledRow], owner: Callable[[int], tuple[SourceId, SeqKey] | None]
) -> list[OwnedVector]:
    """Return a step's embeddings and scores with their sequences, which `owner` finds by row."""
    owned = ((owner(each.row), each.vector) for each in pooled)
    return [(*found, vector) for found, vector in owned if found is not None]


def events_to_proto(
    step_id: int,
    events: StepEvents,
    logprobs: Sequence[worker_pb2.SampledLogprob],
    vectors: Iterable[OwnedVector] = (),
) -> dict[SourceId, scheduler_pb2.StepOutput]:
    """Make one message for each source (router's stream) that has events."""
    outputs: dict[SourceId, scheduler_pb2.StepOutput] = {}
    for source, where in _by_source(events.sources):
        output = scheduler_pb2.StepOutput(
            step_id=step_id,
            seq_keys=pack_uint64(events.seq_keys[where]),
            token_ids=pack_int32(events.token_ids[where]),
        )
        if logprobs:
            output.logprobs.extend(_logprobs_to_proto(logprobs, events.result_index[where]))
        outputs[source] = output
    for admitted in events.admitted:
        _output_of(outputs, admitted.source, step_id).admitted.add(
            seq_key=admitted.seq_key,
            num_cached_tokens=admitted.num_cached_tokens,
            queue_s=admitted.queue_s,
        )
    for source, seq_key, vector in vectors:
        _output_of(outputs, source, step_id).pooled.add(seq_key=seq_key, vector=vector)
    for pinned in events.pinned:
        _output_of(outputs, pinned.source, step_id).pinned.add(
            seq_key=pinned.seq_key, num_pinned_tokens=pinned.num_tokens
        )
    for finished in events.finished:
        output = _output_of(outputs, finished.source, step_id)
        output.finished.append(_finished_to_proto(finished))
        if finished.token_ids:
            output.seq_keys += pack_uint64([finished.seq_key] * len(finished.token_ids))
            output.token_ids += pack_int32(finished.token_ids)
    return outputs


def prompt_logprobs_to_proto(
    step_id: int,
    prompt_logprobs: Sequence[worker_pb2.PromptLogprobs],
    owner: Callable[[int], tuple[SourceId, SeqKey] | None],
) -> dict[SourceId, scheduler_pb2.StepOutput]:
    """Make the messages with prompt log-probabilities; `owner` maps rows to sequences."""
    outputs: dict[SourceId, scheduler_pb2.StepOutput] = {}
    for scores in prompt_logprobs:
        if (found := owner(scores.row)) is not None:
            source, seq_key = found
            _output_of(outputs, source, step_id).prompt_logprobs.add(
                seq_key=seq_key, position=scores.position, logprobs=scores.logprobs
            )
    return outputs


def finished_to_proto(finished: Iterable[Finished]) -> dict[SourceId, scheduler_pb2.StepOutput]:
    """Make messages about sequences that ended outside of a step, such as by cancellation."""
    outputs: dict[SourceId, scheduler_pb2.StepOutput] = {}
    for item in finished:
        _output_of(outputs, item.source, 0).finished.append(_finished_to_proto(item))
    return outputs


def merge_step_outputs(outputs: Sequence[scheduler_pb2.StepOutput]) -> scheduler_pb2.StepOutput:
    """Merge messages, all for one source, into one message, in their order."""
    if len(outputs) == 1:
        return outputs[0]
    merged = scheduler_pb2.StepOutput(
        step_id=outputs[-1].step_id,
        seq_keys=b"".join(output.seq_keys for output in outputs),
        token_ids=b"".join(output.token_ids for output in outputs),
    )
    num_tokens = 0
    for output in outputs:
        merged.admitted.extend(output.admitted)
        merged.finished.extend(output.finished)
        merged.prompt_logprobs.extend(output.prompt_logprobs)
        merged.pooled.extend(output.pooled)
        merged.pinned.extend(output.pinned)
        if output.HasField("room"):
            merged.room.CopyFrom(output.room)
        if output.HasField("max_model_len"):
            merged.max_model_len = output.max_model_len
        if output.HasField("adapters"):
            merged.adapters.CopyFrom(output.adapters)
        if output.HasField("is_unloaded"):
            merged.is_unloaded = output.is_unloaded
        for item in output.logprobs:
            merged.logprobs.add(index=num_tokens + item.index, logprob=item.logprob)
        num_tokens += len(output.token_ids) // 4
    return merged


def renamed_part(
    output: scheduler_pb2.StepOutput, names: Mapping[int, int]
) -> scheduler_pb2.StepOutput | None:
    """Copy the parts of `output` that are about the sequences in `names`, under new keys.

    `names` maps a sequence's key in `output` to its key in the copy. The result is None if no part
    is about a sequence in `names`.
    """
    seq_keys = unpack_uint64(output.seq_keys, "seq_keys").tolist()
    places = [place for place, key in enumerate(seq_keys) if key in names]
    part = scheduler_pb2.StepOutput(
        step_id=output.step_id,
        seq_keys=pack_uint64([names[seq_keys[place]] for place in places]),
        token_ids=pack_int32(unpack_int32(output.token_ids, "token_ids")[places]),
    )
    if output.logprobs:
        place_to_index = {place: index for index, place in enumerate(places)}
        for item in output.logprobs:
            if (index := place_to_index.get(item.index)) is not None:
                part.logprobs.add(index=index, logprob=item.logprob)
    has_parts = bool(places)
    for field in ("admitted", "finished", "prompt_logprobs", "pinned"):
        for item in getattr(output, field):
            if item.seq_key in names:
                has_parts = True
                copy = getattr(part, field).add()
                copy.CopyFrom(item)
                copy.seq_key = names[item.seq_key]
    return part if has_parts else None


def _output_of(
    outputs: dict[SourceId, scheduler_pb2.StepOutput], source: SourceId, step_id: int
) -> scheduler_pb2.StepOutput:
    if source not in outputs:
        outputs[source] = scheduler_pb2.StepOutput(step_id=step_id)
    return outputs[source]


def _finished_to_proto(finished: Finished) -> scheduler_pb2.SequenceFinished:
    message = scheduler_pb2.SequenceFinished(
        seq_key=finished.seq_key,
        finish_reason=FINISH_REASON_TO_PROTO[finished.reason],
        stop_token_id=finished.stop_token_id,
        cumulative_logprob=finished.cumulative_logprob,
    )
    if finished.error is not None:
        message.error.code = QuireError.code.value[0]
        message.error.message = finished.error
    return message


def held_logprobs_to_proto(events: StepEvents) -> list[worker_pb2.SampledLogprob]:
    """Convert the log-probabilities in `events` to the form that a step's result has.

    The tokens in `events` are in no result: a worker sampled them for an earlier scheduler.
    """
    return [
        worker_pb2.SampledLogprob(index=index, logprob=token_logprob_to_proto(logprob))
        for index, logprob in events.logprobs
    ]


def _logprobs_to_proto(
    logprobs: Iterable[worker_pb2.SampledLogprob], result_index: Int32Array
) -> Iterator[scheduler_pb2.IndexedLogprob]:
    """Convert a result's log-probabilities for the message to one router.

    Indexes into the result's `sampled_rows` become indexes into the message's `token_ids`. The
    log-probabilities of tokens that are not in the message are left out.
    """
    sampled_to_token = {sampled: token for token, sampled in enumerate(result_index.tolist())}
    for item in logprobs:
        index = sampled_to_token.get(item.index)
        if index is not None:
            yield scheduler_pb2.IndexedLogprob(index=index, logprob=item.logprob)


def _by_source(
    sources: npt.NDArray[np.int32],
) -> Iterator[tuple[SourceId, slice | npt.NDArray[np.intp]]]:
    """Yield each source in `sources`, with the indexes of its entries."""
    if not sources.size:
        return
    if (sources == sources[0]).all():  # the events of a single router need no sorting
        yield SourceId(int(sources[0])), slice(None)
        return
    for source in np.unique(sources).tolist():
        yield SourceId(source), np.flatnonzero(sources == source)
