"""What `quire.v1.LoadingService` answers, to domain values and back."""

from quire.v1 import loading_pb2
from router.domain import LoadProgress, UnloadedWorker


def unloaded_from_proto(message: loading_pb2.UnloadedWorker) -> UnloadedWorker:
    """Reads what a scheduler says of a worker that gave its device back."""
    return UnloadedWorker(message.worker, message.was_unloaded)


def unloaded_to_proto(unloaded: UnloadedWorker) -> loading_pb2.UnloadedWorker:
    """Writes it."""
    return loading_pb2.UnloadedWorker(worker=unloaded.worker, was_unloaded=unloaded.was_unloaded)


def progress_from_proto(message: loading_pb2.LoadResponse) -> LoadProgress:
    """Reads how far a worker is."""
    return LoadProgress(
        worker=message.worker,
        status=message.status,
        progress=message.progress if message.HasField("progress") else None,
        is_done=message.is_done,
        was_loaded=message.was_loaded,
    )


def progress_to_proto(told: LoadProgress) -> loading_pb2.LoadResponse:
    """Writes it."""
    return loading_pb2.LoadResponse(
        worker=told.worker,
        status=told.status,
        progress=told.progress,
        is_done=told.is_done,
        was_loaded=told.was_loaded,
    )
