"""Between a core's calls that have to do with another core, and their place in a recording."""

from collections.abc import Callable

from contract.packing import pack_int32, unpack_int32
from quire.v1 import recording_pb2
from scheduler_svc.core.blocks import HostBlockId
from scheduler_svc.core.handover.moved_request import (
    ExportId,
    ImportId,
    MovedRequest,
    MovedSequence,
)
from scheduler_svc.core.request import Request, SeqKey, SourceId
from scheduler_svc.journal.core_calls import BeginExport, BeginImport, EndExport, EndImport, Move


def move_to_proto(
    call: Move,
    entry: recording_pb2.RecordingEntry,
    request_to_proto: Callable[[Request], recording_pb2.RecordedSubmit],
) -> None:
    """Write a call into its entry."""
    match call:
        case BeginExport(source, first_seq_key):
            entry.begin_export.source = source
            entry.begin_export.first_seq_key = first_seq_key
        case EndExport(export_id, leaves):
            entry.end_export.export_id = export_id
            entry.end_export.leaves = leaves
        case BeginImport(moved):
            message = entry.begin_import
            message.request.CopyFrom(request_to_proto(moved.request))
            message.request.now = moved.arrived
            message.block_size = moved.block_size
            message.bytes_per_block = moved.bytes_per_block
            message.sequences.extend(map(_sequence_to_proto, moved.sequences))
        case EndImport(import_id, output_indices):
            entry.end_import.import_id = import_id
            entry.end_import.output_indices = pack_int32(output_indices)


def move_from_proto(
    entry: recording_pb2.RecordingEntry,
    request_from_proto: Callable[[recording_pb2.RecordedSubmit], Request],
) -> Move:
    """Read the call of an entry that has one of these.

    Raises:
        InvalidArgumentError: An array is not whole.
    """
    match entry.WhichOneof("call"):
        case "begin_export":
            message = entry.begin_export
            return BeginExport(SourceId(message.source), SeqKey(message.first_seq_key))
        case "end_export":
            return EndExport(ExportId(entry.end_export.export_id), entry.end_export.leaves)
        case "begin_import":
            moved = entry.begin_import
            return BeginImport(
                MovedRequest(
                    request=request_from_proto(moved.request),
                    arrived=moved.request.now,
                    block_size=moved.block_size,
                    bytes_per_block=moved.bytes_per_block,
                    sequences=tuple(map(_sequence_from_proto, moved.sequences)),
                )
            )
        case _:
            packed = entry.end_import.output_indices
            indices = unpack_int32(packed, "end_import.output_indices").tolist()
            return EndImport(ImportId(entry.end_import.import_id), tuple(indices))


def _sequence_to_proto(seq: MovedSequence) -> recording_pb2.RecordedMovedSequence:
    return recording_pb2.RecordedMovedSequence(
        output_index=seq.output_index,
        host_block_ids=pack_int32(seq.host_block_ids),
        num_computed_tokens=seq.num_computed_tokens,
        num_charged_tokens=seq.num_charged_tokens,
        num_cached_tokens=seq.num_cached_tokens,
        was_admitted=seq.was_admitted,
    )


def _sequence_from_proto(message: recording_pb2.RecordedMovedSequence) -> MovedSequence:
    blocks = unpack_int32(message.host_block_ids, "begin_import.sequences.host_block_ids")
    return MovedSequence(
        output_index=message.output_index,
        host_block_ids=tuple(HostBlockId(block) for block in blocks.tolist()),
        num_computed_tokens=message.num_computed_tokens,
        num_charged_tokens=message.num_charged_tokens,
        num_cached_tokens=message.num_cached_tokens,
        was_admitted=message.was_admitted,
    )
