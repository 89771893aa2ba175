"""The scheduler's flags and environment variables."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import NoDecode

from contract.liveness.heartbeat import BEAT_S
from rpc.peers.discovery import check_targets
from rpc.settings import Port, PositiveInt, ProcessSettings, split_at_commas
from scheduler_svc.core.policies.arguments import split_arguments
from scheduler_svc.core.policies.make_policy import make_policy


class SchedulerSettings(ProcessSettings):
    grpc_port: Port = 50052
    """Port of gRPC, for the routers; 0 picks a free one."""
    http_port: Port = 8001
    """Port of HTTP, for probes and metrics; 0 picks a free one."""
    drain_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0
    """How long the steps in flight may take after SIGTERM, in seconds; a value above 2 acts as 2.
    The scheduler does not finish live requests: the routers submit them to the next scheduler."""
    workers: Annotated[tuple[str, ...], NoDecode] = ("127.0.0.1:50053",)
    """The workers' gRPC targets, such as 127.0.0.1:50053,unix:/run/worker.sock. dns:HOST:PORT
    stands for every address of the name HOST, which may be a headless service. Workers at any
    target may start and stop while the scheduler runs."""
    discovery_interval_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 5.0
    """How often dns: names are looked up, in seconds."""
    state_file: Path | None = None
    """A file from which the next start restores the LoRA adapters that operators loaded, the sizes
    to which operators resized pools, and how much of the service each tenant has used (for the
    policy `fair`). A scheduler and its standbys share the file. Default: none."""
    scheduler_id: Annotated[str, Field(min_length=1, max_length=128)] = "scheduler"
    """Name of this scheduler in the workers' logs."""
    epoch: Annotated[int, Field(ge=1, lt=2**64)] | None = None
    """This scheduler's epoch; workers obey only the scheduler with the newest epoch. By default it
    is the sum of two numbers. The first is the time of the start, in nanoseconds since 1970, or 1
    more than the newest epoch that workers have seen, whichever is greater. The second is a random
    number below 65,536. So a scheduler that starts later takes over, and of several schedulers that
    start at the same time, one takes over."""
    standby: bool = False
    """Whether to wait until no worker has a scheduler, and then to take over. A scheduler that
    waits opens no port, except with --standby-http. Among several schedulers with this flag, one
    serves. When the serving scheduler dies, a standby takes its place. If the dead scheduler is
    restarted, it waits as a standby. Routers find the scheduler that took over if it listens at the
    same address, or if they have a gRPC target with several addresses, such as
    ipv4:10.0.0.1:50052,10.0.0.2:50052."""
    standby_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.5
    """How long the workers must have had no scheduler before a standby takes over, in seconds. If a
    live scheduler loses its connections, the default leaves it enough time to connect again."""
    standby_silence_s: Annotated[float, Field(ge=2 * BEAT_S, allow_inf_nan=False)] = 1.5
    """How long a scheduler that keeps its connections must have been silent to all workers before a
    standby takes over, in seconds. A healthy scheduler sends a message four times per second. If
    the silent scheduler was only slow, it exits after the takeover; no request is lost, but clients
    see a pause."""
    standby_http: bool = False
    """Whether a standby answers HTTP probes before it takes over. Until the takeover, `/ready`
    answers 200. If the standby and the serving scheduler run on the same machine, their --http-port
    must differ. Needs --standby."""
    lease: str = ""
    """Name of a Kubernetes Lease in the pod's namespace, in which the serving scheduler writes its
    --scheduler-id. With a Lease only one of several standbys takes over. A scheduler that drains
    frees the Lease. While the Lease is free, a standby takes over sooner. If the Lease cannot be
    read or written, the scheduler logs this and works as without a Lease. Empty: none."""
    worker_silence_s: Annotated[float, Field(ge=2 * BEAT_S, allow_inf_nan=False)] = 1.5
    """How long a worker may be silent before it counts as lost, in seconds; a healthy worker sends
    a message four times per second. Other workers recompute the requests of a lost worker. If the
    lost worker is the only one, its requests continue when it answers again."""
    max_waiting: PositiveInt = 1024
    """At most this many sequences may wait at one worker; more are refused, with a retry hint."""
    enable_prefix_caching: bool = True
    """Whether prompts reuse cached blocks of KV that hold the same tokens."""
    kv_events: bool = False
    """Whether to offer streams of KV events, which report the blocks in the prefix caches with
    their tokens (docs/fleet.md). Each block in a prefix cache then takes about 500
    bytes of the scheduler's memory."""
    kv_events_zmq: str = ""
    """Endpoint that publishes KV events over ZeroMQ in vLLM's format, such as tcp://*:5557; empty:
    none. Needs --kv-events and the packages of quire[kv-events]."""
    kv_events_replay: str = ""
    """Endpoint that replays missed events to subscribers, such as tcp://*:5558; empty: none. Needs
    --kv-events-zmq."""
    kv_events_topic: str = "kv-events"
    """Topic of the events; llm-d expects kv@POD@MODEL. Needs --kv-events-zmq."""
    watermark: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Share of the blocks that an admission must leave free or cached, so that running sequences
    can grow."""
    eviction: Literal["lru", "lfu", "fifo"] = "lru"
    """Which cached block is evicted first, in every tier: the least recently used, the least often
    hit, or the one cached first. The last blocks of a prompt are always evicted before its first
    ones."""
    max_pinned_share: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Share of a worker's device blocks that all requests with cache_pin_s together may pin in the
    prefix cache. If a prompt does not fit into the rest of this share, only the beginning of the
    prompt is pinned. If the model has windows or recurrent layers, nothing is pinned."""
    max_tenant_pinned_share: Annotated[float, Field(ge=0, le=1)] = 0.125
    """Share of a worker's device blocks that the requests of one tenant may pin; requests without a
    tenant have no separate limit."""
    defragment_interval_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 10.0
    """Seconds between two measurements of how scattered a busy worker's free blocks are, for a log
    warning and for --defragment-threshold; 0: never."""
    defragment_threshold: Annotated[float, Field(ge=0, le=1)] = 1.0
    """From this fragmentation rate on, held blocks are moved to the low end of the pool, so that
    the free blocks become one run. The rate is 1 - longest free run / free blocks; 0: at any rate
    above 0. Default: never, because allocation needs no adjacent blocks, and each move makes the
    device read and write a block. Moves pay off if blocks are often copied in long runs, as in
    swaps. `quire defragment` starts a single pass of moves at once."""
    max_defragment_moves: PositiveInt = 32
    """The limit on blocks that a step moves to defragment."""
    max_prefill_chunk: PositiveInt | None = None
    """The limit on prompt tokens of one sequence in one step; default: the worker's limit."""
    long_prefill_threshold: Annotated[int, Field(ge=0)] | None = None
    """A prompt with more tokens to compute than this is long: it leaves half of a step to other
    prompts, and short prompts overtake it. Default: 256 on a CPU and 1024 on a GPU, but
    at most half of the tokens that a step may have. 0: all prompts are short. With 0,
    max_decode_slowdown hardly limits steps with fewer than 16 decodes: beside so few decodes, all
    short prompts are computed in one or two steps, even if these steps take long."""
    max_long_prefills: PositiveInt = 1
    """At most this many long prompts are computed at the same time."""
    max_decode_slowdown: Annotated[float, Field(gt=1)] = 1.4
    """A step that decodes may take this many times as long with a chunk of a long prompt as without
    it. Chunks are cut to fit, but not below four tokens, and not so short that prompts queue up. On
    a GPU a step may always have 256 prompt tokens, or proportionally fewer if this factor is below
    1.4. A higher value brings the first token of long prompts sooner, but makes gaps in streams
    longer; inf: no limit."""
    max_prompt_step_s: Annotated[float, Field(gt=0)] = 2.0
    """How long a step with prompts may take, in seconds. During a step no request starts, streams a
    token, or is cancelled. The scheduler estimates from the fastest recent steps how many tokens
    fit into this time. A step late in a long prompt takes longer than that, because its tokens
    attend to more KV. A step may always have 128 tokens, because smaller steps would spend too much
    of their time on reading the weights. inf: no limit."""
    policy: str = "fcfs"
    """Which request is served first: fcfs, priority, fair (between tenants), deadline, a
    combination such as priority+fair+deadline, or the dotted path of a class (docs/policies.md)."""
    policy_arg: Annotated[tuple[str, ...], NoDecode] = ()
    """Arguments of the policy, such as aging_s=30,weight_out=3."""
    preemption_mode: Literal["cost", "swap", "recompute"] = "cost"
    """How to preempt a sequence: swap moves its KV to the worker's host memory while there is room,
    recompute drops the KV, cost chooses the faster one."""
    max_swap_blocks: PositiveInt = 256
    """The limit on blocks that a step swaps in from host memory, and on cached blocks that it saves
    there."""
    max_disk_moves: PositiveInt = 256
    """The limit on concurrent loads of blocks from the worker's disk, and on concurrent stores of
    cached blocks."""
    placement: Literal["prefix", "least-loaded", "round-robin"] = "prefix"
    """Which worker a request goes to: prefix weighs how much of the prompt a worker has cached
    against how busy it is, least-loaded chooses the worker with the fewest sequences, round-robin
    chooses each worker in turn."""
    rebalance: bool = True
    """Whether a request that waits with its KV in host memory is moved to a worker with room for
    it. Both workers need host memory for KV."""
    pull_prefixes: bool = True
    """Whether a request waits for a copy of its prefix from another worker's cache, if the copy is
    faster than computing the prefix. Both workers need host memory for KV."""
    claim_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 10.0
    """How long KV that a worker held for an earlier scheduler is reserved for requests that are
    submitted again, in seconds. After this time, the rest of this KV is released: full blocks
    become cached blocks, and other blocks become free."""
    step_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    """How long a step may take before its worker counts as lost, in seconds."""
    max_backlog_mb: Annotated[int, Field(ge=1, le=2047)] = 16
    """The limit on pending messages for a slow router, in MiB. If the messages exceed the limit,
    the router's stream ends."""
    resume_grace_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0
    """How long a resumable request continues without a client, and how long its outputs are kept
    after its end, in seconds; 0: every request ends with its client's call."""
    resume_max_mb: PositiveInt = 256
    """The limit on memory for the prompts and outputs of resumable requests, in MiB. At the limit,
    the oldest requests without a client are dropped early. If this does not free enough memory, new
    requests are refused."""

    record: Path | None = None
    """Directory in which all scheduling decisions are recorded for `quire replay`, in one file for
    each attachment of a worker; unset: nothing is recorded. Recordings contain the tokens of
    prompts."""
    record_max_mb: PositiveInt = 1024
    """The limit on the space for all recordings of this process, in MiB. At the limit, recording
    stops, and serving continues."""

    @property
    def policy_args(self) -> tuple[tuple[str, str], ...]:
        """The arguments in `policy_arg` as pairs of name and value, sorted by name."""
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

    @model_validator(mode="after")
    def _stands_by_with_http(self) -> Self:
        if self.standby_http and not self.standby:
            raise ValueError("--standby-http needs --standby")
        return self

    @model_validator(mode="after")
    def _kv_events_are_kept(self) -> Self:
        if self.kv_events_zmq and not self.kv_events:
            raise ValueError("--kv-events-zmq needs --kv-events")
        if self.kv_events_replay and not self.kv_events_zmq:
            raise ValueError("--kv-events-replay needs --kv-events-zmq")
        if "kv_events_topic" in self.model_fields_set and not self.kv_events_zmq:
            raise ValueError("--kv-events-topic needs --kv-events-zmq")
        if self.kv_events_zmq and not (find_spec("zmq") and find_spec("msgspec")):
            raise ValueError("--kv-events-zmq needs the packages of quire[kv-events]")
        return self
