"""The routers' streams by source, and who hears of which sequence."""

from collections.abc import Mapping, Sequence

from contract.errors import QuireError
from contract.lora import LoraAdapter
from quire.v1 import scheduler_pb2
from scheduler_svc.core.request import Request, SourceId
from scheduler_svc.routers.resumption import KeptRequests
from scheduler_svc.routers.stream import RouterStream
from scheduler_svc.wire.router import adapters_to_proto, refused_to_proto
from scheduler_svc.workers.request_ends import live_seq_keys


class RouterStreams:
    """All streams that are open, by source, and the requests that may move from one to another."""

    def __init__(self, max_backlog_bytes: int, kept: KeptRequests | None = None) -> None:
        """Without `kept`, no request outlives its stream."""
        self.kept = KeptRequests(grace_s=0, max_bytes=0) if kept is None else kept
        self._max_backlog_bytes = max_backlog_bytes
        self._streams: dict[SourceId, RouterStream] = {}
        self._num_opened = 0

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, router_id: str, max_model_len: int | None = None) -> RouterStream:
        """Open a stream under a source of its own; the number is never used again.

        `max_model_len` is what the router is told as a welcome.
        """
        self._num_opened += 1
        source = SourceId(self._num_opened)
        stream = RouterStream(source, router_id, self._max_backlog_bytes, max_model_len)
        self._streams[source] = stream
        return stream

    def close(self, stream: RouterStream) -> None:
        """Forget a stream; what is sent to it from now on is lost."""
        del self._streams[stream.source]

    def deliver(self, outputs: Mapping[SourceId, scheduler_pb2.StepOutput]) -> None:
        """Send each source its news, of requests that were resumed to who did so.

        Of sources that are gone, nobody hears, but what is kept is kept up to date.
        """
        for source, output in outputs.items():
            if (stream := self._streams.get(source)) is not None:
                stream.deliver(output)
            self.kept.hear(source, output)

    def refuse(self, request: Request, error: QuireError) -> None:
        """Tell a request's source that it is not accepted."""
        self.kept.refuse(request, error)
        if (stream := self._streams.get(request.source)) is not None:
            stream.release(live_seq_keys(request))
            stream.refuse(refused_to_proto(request.first_seq_key, error))

    def beat(self) -> None:
        """Let each router hear something."""
        for stream in self._streams.values():
            stream.beat()

    def tell_room(self, num_seqs: int | None) -> None:
        """Tell each router how many sequences may be submitted; None: it need not count."""
        room = scheduler_pb2.QueueRoom(num_sequences=num_seqs)
        for stream in self._streams.values():
            stream.deliver(scheduler_pb2.StepOutput(room=room))

    def tell_max_model_len(self, max_model_len: int) -> None:
        """Tell each router how many tokens a request may have at most, unless it knows."""
        for stream in self._streams.values():
            stream.tell_max_model_len(max_model_len)

    def tell_unloaded(self, *, is_unloaded: bool) -> None:
        """Tell each router whether no worker has its model, unless it knows."""
        for stream in self._streams.values():
            stream.tell_unloaded(is_unloaded=is_unloaded)

    def tell_adapters(self, adapters: Sequence[LoraAdapter]) -> None:
        """Tell each router which LoRA adapters requests may have from now on."""
        for stream in self._streams.values():
            stream.deliver(adapters_to_proto(adapters))

    def end_all(self, error: QuireError) -> None:
        """End all streams behind what is pending."""
        for stream in self._streams.values():
            stream.end(error)
