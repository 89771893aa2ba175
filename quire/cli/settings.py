"""What each subcommand is told: flags, environment variables, defaults."""

from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, CliPositionalArg, NoDecode, SettingsConfigDict

from rpc.settings import ENV_PREFIX, LinkSettings, Port, ProcessSettings, split_at_commas

Positive = Annotated[int, Field(ge=1)]

_DEVICE: Final = (
    "workers",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "device",
    "dtype",
    "quantization",
    "model_class",
    "kv_cache_memory_gb",
    "kv_cache_dtype",
    "kv_cache_dtype_skip_layers",
    "host_kv_codec",
    "disk_kv_dir",
    "disk_kv_codec",
    "gpu_memory_utilization",
    "speculative",
    "num_draft_tokens",
    "draft_model",
    "ngram_min",
    "ngram_max",
    "num_threads",
)
"""What only workers with a device have."""


class UpSettings(ProcessSettings):
    """Start a router, a scheduler and workers on this machine, and look after them.

    Variables of the processes that have no flag here (QUIRE_MAX_WAITING, for one) reach them too.
    """

    model: Path | None = None
    """Hugging Face model directory; default: the small model that Quire ships."""
    served_model_name: str = ""
    """The name that requests use; empty: the directory's name."""
    model_class: str = ""
    """Which implementation runs the model: the dotted path of a class of yours, as in
    package.module:Class (docs/models.md); "transformers"; empty: the worker's choice."""
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    """How many workers to start; on CUDA each takes a device of its own, or several."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """Where the workers compute: cpu, cuda, or cuda:N; auto is cuda where there is one."""
    tensor_parallel_size: Positive = 1
    """Devices of each worker, which share out each layer of the model."""
    pipeline_parallel_size: Positive = 1
    """Stages of each worker, with a part of the layers on devices of their own."""
    simulate: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Start so many simulated workers instead, in one process: they keep the protocol and take a
    GPU's time, but compute nothing, and their text is random."""
    http_port: Port = 8000
    """Port of the router's HTTP, with OpenAI's API; 0 picks a free one."""
    grpc_port: Port = 50051
    """Port of the router's gRPC; 0 picks a free one."""
    uds: Path | None = None
    """Path of a Unix socket for the router's gRPC, instead of host and port."""
    scheduler_http_port: Port | None = None
    """Port of the scheduler's HTTP, for probes and metrics; 0 picks a free one. Default: the one
    after --http-port if it is free."""
    worker_http_port: Port | None = None
    """Port of the first worker's HTTP, the others' follow; 0 picks free ones. Default: the second
    after --http-port if it is free."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Number format of weights and activations; auto is the checkpoint's, where the device is fast
    in it, else float32."""
    quantization: Literal["int8", "int4"] | None = None
    """Integers that workers round the weights of linear maps to, for less memory and faster
    decoding; on CPUs. Default: none, as --dtype says."""
    max_model_len: Positive | None = None
    """Most tokens of prompt and output together; default: the model's context."""
    max_num_seqs: Positive | None = None
    """Most sequences that run at once at a worker; default: the worker's."""
    max_num_batched_tokens: Positive | None = None
    """Most tokens a step may compute; default: the worker's."""
    num_blocks: Positive | None = None
    """KV blocks of a worker; default: what memory allows."""
    block_size: Positive | None = None
    """Tokens of one KV block; default: the worker's."""
    kv_cache_memory_gb: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Memory for KV blocks of a worker, in GiB; default: what memory allows."""
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = "auto"
    """What workers store KV in: auto is what the model computes in; int8 or fp8 take about half the
    room of bfloat16."""
    kv_cache_dtype_skip_layers: str = ""
    """Layers whose KV is stored in what the model computes in all the same, from 0: 0,1,23."""
    host_kv_memory_gb: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Host memory for KV that a worker's device has no room for, in GiB; default: the worker's."""
    host_kv_codec: str = ""
    """How a worker holds KV in host memory: none, int8 or fp8; empty: none."""
    disk_kv_memory_gb: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Room on the disk for KV that a worker's host memory has none for, in GiB; default: none."""
    disk_kv_dir: Path | None = None
    """Where on the disk; default: the worker's."""
    disk_kv_codec: str = ""
    """How a worker holds KV on the disk: none, lz4, zstd, gzip, int8 or fp8; empty: none."""
    policy: str = ""
    """Who is served first: fcfs, priority, fair, deadline, a combination such as
    priority+fair+deadline, or the dotted path of a class; empty: fcfs."""
    preemption_mode: Literal["cost", "swap", "recompute"] | None = None
    """What becomes of the KV of a sequence that must make room; default: what costs less."""
    max_decode_slowdown: Annotated[float, Field(gt=1)] | None = None
    """How much longer a step may take for a part of a long prompt while others stream; inf: no
    bound; default: the scheduler's, 1.4."""
    eviction: Literal["lru", "lfu", "fifo"] | None = None
    """Which cached KV block is evicted first; default: lru."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of a GPU's memory for weights, work space and KV together; default: the worker's."""
    speculative: Literal["ngram", "draft"] | None = None
    """How workers guess next tokens, to verify several in a step: by what followed the last few
    before, or by --draft-model; the output stays the same. Default: not at all."""
    num_draft_tokens: Positive | None = None
    """Most tokens that are guessed at a time; default: the worker's, 4."""
    draft_model: Path | None = None
    """Hugging Face directory of a smaller model with the same tokens, which guesses."""
    ngram_min: Positive | None = None
    """Fewest last tokens that must have occurred before for a guess; default: the worker's, 2."""
    ngram_max: Positive | None = None
    """Most last tokens that are looked for; default: the worker's, 4."""
    num_threads: Positive | None = None
    """Threads of each worker that computes on a CPU; default: all cores, shared evenly."""
    api_key: Annotated[tuple[SecretStr, ...], NoDecode] = ()
    """Keys, separated by commas, one of which every call of the router must have; better given in
    the environment, since others see a command line."""
    api_keys_file: Path | None = None
    """TOML file of keys with their tenants, and of the tenants' quotas (docs/security.md)."""
    trace_sample_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of the requests to trace (--otlp-traces-endpoint), of those whose client has not said
    by a traceparent whether to; default: the router's, 0.01."""
    detach: bool = False
    """Return when the service is ready and leave it up; `quire down` stops it."""
    demo: bool = False
    """Stream one completion in the terminal when the service is ready."""
    verbose: bool = False
    """Show the processes' logs as they are written."""
    attached: bool = False
    """End when standard input does: for a program that starts a service for itself, since its end,
    however it comes, closes the pipe."""

    @field_validator("api_key", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return split_at_commas(value)

    @model_validator(mode="after")
    def _workers_have_devices_of_their_own(self) -> Self:
        for name in ("workers", "tensor_parallel_size", "pipeline_parallel_size"):
            if (count := getattr(self, name)) > 1 and ":" in self.device:
                flag = name.replace("_", "-")
                raise ValueError(
                    f"--device is {self.device}, which is one GPU, but --{flag} is {count}:"
                    " give --device cuda, and CUDA_VISIBLE_DEVICES to choose among GPUs"
                )
        return self

    @property
    def devices_per_worker(self) -> int:
        """Of each worker, if they are GPUs."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @model_validator(mode="after")
    def _attached_is_not_detached(self) -> Self:
        if self.attached and self.detach:
            raise ValueError("--attached: cannot be with --detach")
        return self

    @model_validator(mode="after")
    def _simulation_has_no_device(self) -> Self:
        fields = type(self).model_fields
        given = [name for name in _DEVICE if getattr(self, name) != fields[name].default]
        if self.simulate is not None and given:
            flags = ", ".join("--" + name.replace("_", "-") for name in given)
            raise ValueError(f"--simulate: {self.simulate}: simulated workers have no {flags}")
        return self


class RouterClientSettings(LinkSettings):
    """What every command that calls a router is told."""

    api_key: SecretStr = SecretStr("")
    """The key to call the router with, if it asks for one; better given in the environment, since
    others see a command line."""


class ClientSettings(RouterClientSettings):
    """What `generate` and `chat` share."""

    target: str = ""
    """The router's gRPC: host:port, or unix:/path; empty: the service that runs on this machine, if
    it is the only one, else 127.0.0.1:50051."""
    served_model_name: str = ""
    """Which of the service's models; empty: the only one served."""
    max_tokens: Positive | None = None
    """Most tokens to produce; default: as many as the context has room for."""
    temperature: float | None = None
    """0 takes the likeliest token each time; default: 1."""
    top_p: float | None = None
    """Keep the smallest set of likely tokens with so much probability; default: all."""
    top_k: int = 0
    """Keep only so many of the likeliest tokens; 0 keeps all."""
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    """Makes the output repeatable."""
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """The request's deadline, in seconds; default: none."""


class GenerateSettings(ClientSettings):
    """Continue a prompt, streaming."""

    prompt: CliPositionalArg[str]
    """The text to continue; - reads standard input."""
    n: Positive = 1
    """How many outputs; more than one are shown when complete, one after another."""
    beam_width: Annotated[int, Field(ge=2, le=10)] | None = None
    """Search for the likeliest outputs, keeping so many beginnings; default: draw."""
    length_penalty: Annotated[float, Field(ge=-5, le=5)] = 1.0
    """With --beam-width: above 0 longer outputs are favoured."""
    early_stopping: Literal["false", "true", "never"] = "false"
    """With --beam-width: when the search stops, as transformers has it."""
    stop: str = ""
    """Text that ends the output; empty: none."""
    cache_pin_s: Annotated[float, Field(gt=0, le=86400)] | None = None
    """Keep the prompt in the prefix cache for so many seconds, whatever else is evicted."""
    ignore_eos: bool = False
    """Go on past the model's end of text."""

    @model_validator(mode="after")
    def _search_has_a_width(self) -> Self:
        fields = type(self).model_fields
        for name in ("length_penalty", "early_stopping"):
            if self.beam_width is None and getattr(self, name) != fields[name].default:
                raise ValueError(f"--{name.replace('_', '-')} needs --beam-width")
        return self


class ChatSettings(ClientSettings):
    """Chat with the model, streaming; /new forgets the conversation, /quit or Ctrl-D ends it."""

    system: str = ""
    """What the conversation begins with, as the system's message."""


class BenchSettings(RouterClientSettings):
    """Measure a service: streams of random tokens, each sent when the one before it is complete.

    Starts a service for it, unless a target is given, and stops it afterwards.
    """

    target: str = ""
    """The gRPC of a service that is up: host:port, or unix:/path; empty: one is started."""
    model: Path | None = None
    """The model of the service that is started; default: the small model that Quire ships."""
    concurrency: Positive = 8
    """Streams at once."""
    num_prompts: Positive = 64
    """Requests in all."""
    input_len: Positive = 128
    """Tokens of a prompt."""
    output_len: Positive = 64
    """Tokens of an output."""
    profile: Path | None = None
    """Write a timeline of scheduler, wire and worker to this file, for ui.perfetto.dev, and show
    where the time of a step goes; needs a service that is started for it."""

    @model_validator(mode="after")
    def _profile_needs_its_own_service(self) -> Self:
        if self.target and (self.profile or self.model):
            flag = "--profile" if self.profile else "--model"
            raise ValueError(f"{flag}: needs a service that is started for it; leave out --target")
        return self


class StatusSettings(RouterClientSettings):
    """Show the service's processes, their health and their load. Exits with 0 if all are ready."""

    target: str = ""
    """A router elsewhere: host:port, or unix:/path; empty: what runs on this machine."""


class DefragmentSettings(LinkSettings):
    """Move the KV blocks that are held together, at each worker, while it goes on working."""

    scheduler: str = ""
    """The scheduler's gRPC: host:port, or unix:/path; empty: that of the service that runs on this
    machine, if it is the only one, else 127.0.0.1:50052."""


class KvSettings(RouterClientSettings):
    """Show who holds which KV blocks: a map of each worker's tiers, and its live sequences."""

    target: str = ""
    """The router's gRPC: host:port, or unix:/path; empty: the service that runs on this machine, if
    it is the only one, else 127.0.0.1:50051."""
    worker: str = ""
    """Only this worker, by its target; empty: all."""
    first_block: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Show blocks from this one on."""
    first_seq_id: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Show sequences from this one on."""
    max_sequences: Annotated[int, Field(ge=0, le=1024)] = 256
    """Most sequences of a worker."""
    json_: Annotated[bool, Field(alias="json")] = False
    """Write JSON, with block tables and reference counts."""


class TopSettings(RouterClientSettings):
    """Watch a service: queues, sequences, KV tiers, and what each worker does. q quits.

    How long first tokens take, and what is refused, only the router's HTTP tells, whose address is
    known of services that run on this machine.
    """

    target: str = ""
    """The router's gRPC: host:port, or unix:/path; empty: the service that runs on this machine, if
    it is the only one, else 127.0.0.1:50051."""
    interval_s: Annotated[float, Field(gt=0, le=3600)] = 1.0
    """Seconds between two frames; rates are of that time."""
    once: bool = False
    """Print one frame, after one interval, and end."""
    max_sequences: Annotated[int, Field(ge=0, le=1024)] = 256
    """Most sequences of a worker to ask for; as many are shown as the terminal has room for."""


class MigrateSettings(LinkSettings):
    """Move a live request with its KV to another worker; its output stays what it would be."""

    request_id: CliPositionalArg[str]
    """The request's id, as `quire kv` shows it."""
    to: str
    """The worker's target, as `quire kv` shows it."""
    scheduler: str = ""
    """The scheduler's gRPC: host:port, or unix:/path; empty: that of the service that runs on this
    machine, if it is the only one."""


class DrainSettings(RouterClientSettings):
    """Have one process drain and end: a router, a scheduler or a worker, of whatever machine.

    A router hands over what its clients can resume, a worker gives its sequences to others first.
    Exits with 0 when it has drained.
    """

    target: CliPositionalArg[str]
    """The process's gRPC: host:port, or unix:/path."""


class _CommandSettings(BaseSettings):
    model_config = SettingsConfigDict(
        frozen=True,
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        use_attribute_docstrings=True,
    )


class ProbeSettings(_CommandSettings):
    """Ask one process whether it is ready, as a container's health check does. Exits with 0 if so.

    It takes the variables that tell the process where to listen.
    """

    host: str = "127.0.0.1"
    """Where the process listens."""
    http_port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """The port of its HTTP; default: a router's."""
    tls_cert: Path | None = None
    """File of the certificate that the process shows, which is not read: if there is one, HTTP is
    in TLS."""


class ReplaySettings(_CommandSettings):
    """Feed a recording of a scheduler (`--record`) to a new core. Exits with 1 if a plan differs.

    Shows the totals, and for each preemption when it was, whom it hit, why, and what it cost. With
    --policy it shows instead what would have been under another policy.
    """

    file: CliPositionalArg[Path]
    """The recording: one worker's, from one attachment."""
    step: Positive | None = None
    """Show this step's plan in full instead."""
    policy: str = ""
    """Simulate this policy, and the recorded one, on the recorded requests (docs/replay.md)."""
    policy_arg: Annotated[tuple[str, ...], NoDecode] = ()
    """Arguments of that policy, such as aging_s=30,weight_out=3."""

    @field_validator("policy_arg", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return split_at_commas(value)

    @model_validator(mode="after")
    def _either_or(self) -> Self:
        if self.policy and self.step is not None:
            raise ValueError("--step: is of the recorded plans; it cannot be with --policy")
        if self.policy_arg and not self.policy:
            raise ValueError("--policy-arg: is given without --policy")
        return self


class DownSettings(_CommandSettings):
    """Stop a service that `quire up` started: let live requests finish, then end its processes."""

    http_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Which one, by the port of its router's HTTP; default: the only one there is."""
    all: bool = False
    """Stop every one."""


class RestartSettings(_CommandSettings):
    """Restart the processes of a service that `quire up` started, one after another.

    Each drains and ends, and is ready again before the next one's turn. Streams pause while a
    worker or the scheduler is replaced; while the router is, calls are refused and tried again.
    """

    names: CliPositionalArg[tuple[str, ...]] = ()
    """Which ones, as `quire status` shows them; default: workers, scheduler and router."""
    http_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Of which service, by the port of its router's HTTP; default: the only one there is."""
