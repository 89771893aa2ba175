"""The scheduler's flags and environment variables."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import NoDecode

from rpc.peers.discovery import check_targets
from rpc.settings import Port, PositiveInt, ProcessSettings, split_at_commas
from scheduler_svc.core.policies.arguments import split_arguments
from scheduler_svc.core.policies.loading import make_policy


class SchedulerSettings(ProcessSettings):
    """Flags and environment of the scheduler."""

    grpc_port: Port = 50052
    """Port of gRPC, for the routers; 0 picks a free one."""
    http_port: Port = 8001
    """Port of HTTP, for probes and metrics; 0 picks a free one."""
    drain_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0
    """How long the steps in flight may take to finish after SIGTERM, in seconds, two at most; live
    requests do not finish but go on, from the routers, at the next scheduler."""
    workers: Annotated[tuple[str, ...], NoDecode] = ("127.0.0.1:50053",)
    """The workers' gRPC targets, such as 127.0.0.1:50053,unix:/run/worker.sock. dns:HOST:PORT
    stands for each address that the name has, as a headless service's does; such workers come and
    go while the scheduler runs."""
    discovery_interval_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 5.0
    """How often such names are looked up, in seconds."""
    scheduler_id: Annotated[str, Field(min_length=1, max_length=128)] = "scheduler"
    """Names this scheduler in the workers' logs."""
    epoch: Annotated[int, Field(ge=1, lt=2**64)] | None = None
    """This scheduler's reign over its workers; only the newest is obeyed. Default: the wall clock
    at the start, in milliseconds, or one more than the workers have seen, if that is more: so that
    a scheduler that starts later takes over."""
    standby: bool = False
    """Whether to wait, with no port open, until no worker has a scheduler, and then to take over.
    Of schedulers that all have this flag one serves, and any other takes its place when it dies;
    one that is started again waits. Routers find it if it listens where the other did, or by a
    gRPC target of several addresses, such as ipv4:10.0.0.1:50052,10.0.0.2:50052."""
    standby_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.5
    """How long the workers must have been without a scheduler for that, in seconds."""
    max_waiting: PositiveInt = 1024
    """Most sequences that may wait at one worker; more are refused, with a hint when to retry."""
    enable_prefix_caching: bool = True
    """Whether blocks of KV are found again by the tokens they hold."""
    watermark: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Share of the blocks that admission leaves free for the running sequences to grow into."""
    eviction: Literal["lru", "lfu", "fifo"] = "lru"
    """Which cached block is evicted first, in every tier: the one that was used longest ago, hit
    least often, or cached first. In each order the end of a prompt goes before its beginning."""
    max_pinned_share: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Share of a worker's device blocks that requests, of whatever tenant, may pin in the prefix
    cache (cache_pin_s); of a prompt that does not fit, the beginning is pinned."""
    defragment_interval_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 10.0
    """How often a worker's free blocks are looked at while it works, for a warning if they are
    scattered, and for --defragment-threshold; 0: never."""
    defragment_threshold: Annotated[float, Field(ge=0, le=1)] = 1.0
    """From which fragmentation rate, 1 - longest free run / free blocks, the held blocks are then
    moved together; 0: from any. Default: never, because a block of fixed size needs no neighbours,
    and each move costs the device a block's reading and writing; it pays where long runs do, as in
    swaps. `quire defragment` does it once."""
    max_defragment_moves: PositiveInt = 32
    """Most blocks that a step moves for that."""
    max_prefill_chunk: PositiveInt | None = None
    """Most prompt tokens of one sequence in one step; default: what the worker allows."""
    long_prefill_threshold: Annotated[int, Field(ge=0)] | None = None
    """A prompt with more tokens to compute is long: it leaves half of a step to others, and short
    ones overtake it. Default: half of the tokens that keep the worker's device busy, 256 on a CPU
    and 1024 on a GPU, or half of the tokens that a step may have if less; 0: none is long, and
    max_decode_slowdown bounds nothing, since short prompts are computed at once."""
    max_long_prefills: PositiveInt = 1
    """Most long prompts that are computed at the same time."""
    max_decode_slowdown: Annotated[float, Field(gt=1)] = 1.4
    """How much longer a step may take for a part of a long prompt while others stream: the parts
    are made as short as that, or four tokens, unless prompts would queue up. More gives the long
    prompt's first token sooner, and longer gaps in the streams; inf: no bound."""
    max_prompt_step_s: Annotated[float, Field(gt=0)] = 2.0
    """How long a step may take for prompts, in seconds, whoever is beside them: meanwhile nothing
    else starts, nothing streams and no cancellation takes effect. What there is time for is learned
    from the steps, the fastest above all: far into a long context it takes longer. 128 tokens
    always go in one, because reading the weights takes as long as computing some 16 of them, which
    in smaller steps would be much of the time. inf: no bound."""
    policy: str = "fcfs"
    """Who is served first: fcfs, priority, fair (between tenants), deadline, a combination such as
    priority+fair+deadline, or the dotted path of a class (docs/policies.md)."""
    policy_arg: Annotated[tuple[str, ...], NoDecode] = ()
    """Arguments of the policy, such as aging_s=30,weight_out=3."""
    preemption_mode: Literal["cost", "swap", "recompute"] = "cost"
    """What becomes of the KV of a sequence that must make room: swap moves it to the worker's host
    memory as long as there is some, recompute drops it, cost does what takes less time."""
    max_swap_blocks: PositiveInt = 256
    """Most blocks that one step brings back from host memory, most cached ones it saves there."""
    max_disk_moves: PositiveInt = 256
    """Most blocks on their way from the worker's disk, and most cached ones on their way there."""
    placement: Literal["prefix", "least-loaded", "round-robin"] = "prefix"
    """Which worker a request goes to: prefix weighs what its prefix cache has of the prompt against
    how busy it is, least-loaded takes the one with the fewest sequences, round-robin each in
    turn."""
    rebalance: bool = True
    """Whether a request that waits with its KV in host memory is moved to a worker with room for
    it. That needs host memory for KV at both."""
    claim_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 10.0
    """How long what a worker held for the scheduler before is kept for routers to submit again, in
    seconds; of what is not claimed by then the full blocks stay cached, and the rest is freed."""
    step_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    """How long a step may take before its worker counts as lost, in seconds."""
    max_backlog_mb: Annotated[int, Field(ge=1, le=2047)] = 16
    """How much may wait for a router that does not read, in MiB, before its stream is ended."""
    resume_grace_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0
    """How long a request that its client may resume goes on without one, and how long what came of
    it is kept after its end, in seconds; 0: every request ends with its client's call."""
    resume_max_mb: PositiveInt = 256
    """How much memory the prompts and outputs of resumable requests may take, in MiB. Beyond it the
    oldest of those that nobody reads are given up early, and then no more are taken."""

    record: Path | None = None
    """Directory for recordings of all that the scheduler decides, one file for each attachment of a
    worker, which `quire replay` reads; unset: none are made. They hold the prompts' tokens."""
    record_max_mb: PositiveInt = 1024
    """Most that the recordings of this process may take together, in MiB; then it records no more,
    and serves on."""

    @property
    def policy_args(self) -> tuple[tuple[str, str], ...]:
        """`policy_arg` by name, in an order that does not depend on the operator's."""
        return split_arguments(self.policy_arg)

    @field_validator("workers", "policy_arg", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return split_at_commas(value)

    @field_validator("workers")
    @classmethod
    def _can_be_found(cls, workers: tuple[str, ...]) -> tuple[str, ...]:
        check_targets(workers)
        return workers

    @model_validator(mode="after")
    def _has_policy(self) -> Self:
        args = self.policy_args
        try:
            make_policy(self.policy, args)
        except ValueError as error:
            raise ValueError(f"--policy, --policy-arg: {error}") from error
        return self
