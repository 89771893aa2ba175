"""One request that its client may resume: how it was submitted, and all that came of it."""

from contract.packing import pack_uint64
from quire.v1 import common_pb2, scheduler_pb2
from scheduler_svc.core.request import Request, SeqKey
from scheduler_svc.routers.stream import RouterStream


class KeptOutput:
    """What one sequence has produced."""

    def __init__(self, so_far: scheduler_pb2.OutputSoFar | None) -> None:
        """`so_far` is what it had when its router submitted it again."""
        self.token_ids = bytearray(b"" if so_far is None else so_far.token_ids)
        """int32, little-endian: as in `quire.v1.StepOutput`."""
        self.end: scheduler_pb2.SequenceFinished | None = None
        self.logprobs: list[common_pb2.TokenLogprob] = []
        """Of the tokens from `first_logprob` on, if any are wanted."""
        self.first_logprob = len(self.token_ids) // 4
        if so_far is not None and so_far.finished:
            self.end = so_far.end


class KeptRequest:
    """Belongs to `KeptRequests`, which alone changes it."""

    def __init__(self, request: Request, submit: scheduler_pb2.Submit, owner: RouterStream) -> None:
        self.source = request.source
        """The core knows it as this source's, whoever owns it."""
        self.first_seq_key = request.first_seq_key
        self.deadline = request.deadline
        self.router_id = owner.router_id
        """Of the last owner."""
        self.owner: RouterStream | None = owner
        """Who hears of it; None: nobody does, until somebody resumes it."""
        self.owner_seq_key = int(request.first_seq_key)
        """What the owner calls output 0."""
        self.until: float | None = None
        """When it is given up; None: as long as it has an owner and goes on."""
        so_fars = submit.outputs or [None] * submit.n
        self.outputs = tuple(KeptOutput(so_far) for so_far in so_fars)
        self.prompt_logprobs: list[scheduler_pb2.SequencePromptLogprobs] = []
        self.admitted: scheduler_pb2.SequenceAdmitted | None = None
        """Of output 0, the first time."""
        self.num_pinned_tokens = 0
        self._submit = scheduler_pb2.Submit()
        self._submit.CopyFrom(submit)
        self._submit.ClearField("outputs")
        self._num_other_bytes = self._submit.ByteSize()

    @property
    def name(self) -> tuple[str, str]:
        """Tenant and request id."""
        return self._submit.tenant, self._submit.request_id

    @property
    def has_ended(self) -> bool:
        """Whether all its outputs have."""
        return all(output.end is not None for output in self.outputs)

    @property
    def live_seq_keys(self) -> list[SeqKey]:
        """The keys, at its source, of the sequences that have not ended."""
        return [
            SeqKey(self.first_seq_key + index)
            for index, output in enumerate(self.outputs)
            if output.end is None
        ]

    @property
    def num_bytes(self) -> int:
        """About as much memory as it takes."""
        return self._num_other_bytes + sum(len(output.token_ids) for output in self.outputs)

    def hear_logprob(self, index: int, logprob: common_pb2.TokenLogprob) -> None:
        """Keep the log-probability of the next token of an output."""
        self.outputs[index].logprobs.append(logprob)
        self._num_other_bytes += logprob.ByteSize()

    def hear_prompt_logprobs(self, part: scheduler_pb2.SequencePromptLogprobs) -> None:
        """Keep what the model makes of a part of the prompt."""
        self.prompt_logprobs.append(part)
        self._num_other_bytes += part.ByteSize()

    def resumed(self, first_seq_key: int) -> scheduler_pb2.Resumed:
        """Tell all, to a router that calls output 0 `first_seq_key`."""
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
