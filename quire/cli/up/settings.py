"""What `quire up` is told: flags, environment variables, defaults."""

from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import NoDecode

from rpc.settings import Port, PositiveInt, ProcessSettings, split_at_commas

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
    "timeline_dir",
)
"""Flags that `quire up` passes on to every process."""
ROUTER_FLAGS: Final = ("api_keys_file", "trace_sample_ratio")
SCHEDULER_FLAGS: Final = (
    "policy",
    "preemption_mode",
    "max_decode_slowdown",
    "max_prompt_step_s",
    "eviction",
)
ANY_WORKER_FLAGS: Final = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_blocks",
    "block_size",
    "host_kv_memory_gb",
    "disk_kv_memory_gb",
)
"""Flags for workers, simulated ones too."""
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
_NOT_SIMULATED: Final = ("workers", "device", "num_threads", *DEVICE_WORKER_FLAGS)


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
    lora: Annotated[tuple[str, ...], NoDecode] = ()
    """LoRA adapters as NAME=DIR, separated by commas, each in the format of PEFT; a request whose
    model is NAME is computed with it (docs/models.md)."""
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    """How many workers to start; on CUDA each takes a device of its own, or several."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """Where the workers compute: cpu, cuda, or cuda:N; auto is cuda where there is one."""
    tensor_parallel_size: PositiveInt = 1
    """Devices of each worker, which share out each layer of the model."""
    pipeline_parallel_size: PositiveInt = 1
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
    max_model_len: PositiveInt | None = None
    """Most tokens of prompt and output together; default: the model's context."""
    max_num_seqs: PositiveInt | None = None
    """Most sequences that run at once at a worker; default: the worker's."""
    max_num_batched_tokens: PositiveInt | None = None
    """Most tokens a step may compute; default: the worker's."""
    num_blocks: PositiveInt | None = None
    """KV blocks of a worker; default: what memory allows."""
    block_size: PositiveInt | None = None
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
    max_prompt_step_s: Annotated[float, Field(gt=0)] | None = None
    """How long a step may take for prompts, in seconds; inf: no bound; default: the scheduler's,
    2."""
    eviction: Literal["lru", "lfu", "fifo"] | None = None
    """Which cached KV block is evicted first; default: lru."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of a GPU's memory for weights, work space and KV together; default: the worker's."""
    speculative: Literal["ngram", "draft"] | None = None
    """How workers guess next tokens, to verify several in a step: by what followed the last few
    before, or by --draft-model; the output stays the same. Default: not at all."""
    num_draft_tokens: PositiveInt | None = None
    """Most tokens that are guessed at a time; default: the worker's, 4."""
    draft_model: Path | None = None
    """Hugging Face directory of a smaller model with the same tokens, which guesses."""
    ngram_min: PositiveInt | None = None
    """Fewest last tokens that must have occurred before for a guess; default: the worker's, 2."""
    ngram_max: PositiveInt | None = None
    """Most last tokens that are looked for; default: the worker's, 4."""
    num_threads: PositiveInt | None = None
    """Threads of each worker that computes on a CPU; default: all cores, shared evenly."""
    api_key: Annotated[tuple[SecretStr, ...], NoDecode] = ()
    """Keys, separated by commas, one of which every call of the router must have; better given in
    the environment, since others see a command line."""
    api_keys_file: Path | None = None
    """TOML file of keys with their tenants, and of the tenants' quotas (docs/security.md)."""
    ui: bool = True
    """Whether the router has a web page at /ui: what the service is doing, and a playground."""
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

    @field_validator("api_key", "lora", mode="before")
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
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @model_validator(mode="after")
    def _attached_is_not_detached(self) -> Self:
        if self.attached and self.detach:
            raise ValueError("--attached: cannot be with --detach")
        return self

    @model_validator(mode="after")
    def _simulation_has_no_device(self) -> Self:
        fields = type(self).model_fields
        given = [name for name in _NOT_SIMULATED if getattr(self, name) != fields[name].default]
        if self.simulate is not None and given:
            flags = ", ".join("--" + name.replace("_", "-") for name in given)
            raise ValueError(f"--simulate: {self.simulate}: simulated workers have no {flags}")
        return self
