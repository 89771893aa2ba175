"""The worker's settings: each is a flag and an environment variable."""

import socket
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import NoDecode

from contract.info import Role
from contract.lora import is_adapter_name
from gpu_worker.kv.codecs.names import CodecSpec, parse_codec
from model_files.locate import DEFAULT_CACHE_DIR, name_of
from rpc.settings import ModelName, Port, PositiveInt, ProcessSettings, split_at_commas


class WorkerSettings(ProcessSettings):
    """A worker's flags and environment variables."""

    grpc_port: Port = 50053
    """Port of gRPC; 0 picks a free one."""
    http_port: Port = 8002
    """Port of HTTP; 0 picks a free one."""
    drain_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0
    """How long the worker may drain after SIGTERM, in seconds. While the worker drains, running
    steps finish, and the scheduler continues the worker's sequences on other workers."""
    model: ModelName
    """The model: a Hugging Face directory, a GGUF file, a name on the Hugging Face hub such as
    Qwen/Qwen3-0.6B, or a URL such as s3://BUCKET/DIRECTORY (docs/models.md)."""
    cache_dir: Path = DEFAULT_CACHE_DIR
    """Directory for files made from GGUF files or older tokenizers, or downloaded from URLs.
    Models from the hub are in the hub's own cache (HF_HOME)."""
    unloaded: bool = False
    """Start without the model; an operator, or a router with --on-demand, loads it later."""
    model_class: str = ""
    """The implementation that runs the model: your class as package.module:Class (docs/models.md),
    or "transformers". Empty: Quire's own if it supports the architecture, else that of
    transformers."""
    served_model_name: str = ""
    """The model's name in requests; empty: the name of its directory or file, or its name on the
    hub (docs/models.md)."""
    worker_id: str = Field(default_factory=socket.gethostname)
    """This worker's name in logs and for the scheduler; unset: the machine's name."""
    role: Role = Role.BOTH
    """What this worker computes: prompts (prefill), outputs (decode), or both. If no worker with
    the other role is attached, this worker computes both. After its prompt, a request moves with
    its KV to a worker for outputs, through the host memory of both workers (host-kv-memory-gb,
    docs/fleet.md)."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """Where the model runs: cpu, cuda or cuda:N; auto is cuda if there is a GPU, else cpu."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Number format of weights and activations; auto is the checkpoint's format, or float32 if the
    device is slow with that format."""
    load_format: Literal["auto", "dummy"] = "auto"
    """auto reads the weights. dummy draws random weights on the device instead, to measure speed
    and memory; the model then outputs nonsense. dummy ignores the format of a quantized checkpoint,
    unless this format is MXFP4."""
    quantization: Literal["int8", "int4"] | None = None
    """Quantize the weights of linear maps when they are read, for less memory and faster decoding.
    This works with Quire's own implementations and with your own class (model-class). int8: each
    output has a scale. int4: each group of 32 inputs of an output has a scale and an offset; the LM
    head is in int8. Maps that are quantized in the checkpoint stay as they are. Unset: not
    quantized."""
    lora: Annotated[tuple[str, ...], NoDecode] = ()
    """LoRA adapters as NAME=DIR, in PEFT's format, separated by commas. A request whose model is
    NAME uses that adapter. Adapters work only with Quire's own implementations (docs/models.md)."""
    max_model_len: Annotated[int, Field(ge=2)] | None = None
    """The largest number of tokens in a sequence, prompt and output together; unset: the model's
    limit. In a model with LongRoPE, this limit selects the short or the long factors
    (docs/models.md)."""
    max_num_seqs: PositiveInt | None = None
    """The largest number of sequences that run at once; unset: 64 on a CPU, 256 on a GPU, 512 on a
    GPU with 80 GB, 1024 on a GPU with 120 GiB or more."""
    max_num_batched_tokens: PositiveInt | None = None
    """The largest number of tokens in one step; the scheduler may send fewer. Unset: 2048, or 8192
    on a GPU with 80 GB or more; but at least max-num-seqs."""
    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    """Number of tokens whose KV one block holds."""
    num_blocks: PositiveInt | None = None
    """Number of blocks in KV memory; unset: as many as fit in kv-cache-memory-gb."""
    kv_cache_memory_gb: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """KV memory in GiB; unset: on a GPU, the part of gpu-memory-utilization that the model leaves;
    on a CPU, 1 GiB or half of the free memory, whichever is less."""
    max_kv_memory_gb: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Size in GiB to which the KV pool can grow while in use (quire resize). For the growth, the
    worker reserves addresses, but no memory. 0: the size is fixed. Unset: on a CPU, all memory of
    the machine; on GPUs, and with draft-model, the size is fixed."""
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = "auto"
    """Number format of stored KV: auto is the model's dtype; int8 and fp8 (e4m3) take about half
    the memory of bfloat16, so about twice as many tokens fit. Each slot and kv head has a scale."""
    kv_cache_dtype_skip_layers: str = ""
    """Layers whose KV is not quantized, numbered from 0, such as 0,1,23."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the GPU's memory that may be in use, including what other processes use. KV gets the
    rest of this share, after other processes, the weights and temporary tensors."""
    memory_warning_share: Annotated[float, Field(ge=0, le=1)] | None = None
    """If less than this share of the device's memory is available, the number of running sequences
    may not grow, and prompts are computed in smaller parts. On a CPU, the device's memory is what
    the machine or container allows the process. 0: never. Unset: 0.03, or half of the share that is
    available when the worker is ready, if that is less."""
    memory_critical_share: Annotated[float, Field(ge=0, le=1)] | None = None
    """If less than this share of the device's memory is available, half of the running sequences
    are preempted, and half of the rest after every further ten seconds. 0: never. Unset: 0.01, or a
    quarter of the share that is available when the worker is ready, if that is less."""
    host_kv_memory_gb: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Host memory in GiB for KV that does not fit on the device. Unset: on a GPU, or if role is
    prefill or decode, 4 GiB or a quarter of the free memory, whichever is less; otherwise 0,
    because a CPU's KV is in host memory anyway."""
    host_kv_codec: str = "none"
    """How KV is encoded in host memory: none, as on the device; int8 or fp8, in half the memory but
    less precise, so a sequence's output may differ after its KV was in host memory."""
    disk_kv_memory_gb: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Disk space in GiB for KV; 0: none. Needs host memory for KV."""
    disk_kv_dir: Path | None = None
    """Directory of the disk tier's file; choose a fast disk, and not a tmpfs. The next worker with
    the same model and KV format continues with the blocks of this file. Unset: a file in /var/tmp
    that has no name and disappears with the worker."""
    disk_kv_codec: str = "none"
    """How KV is encoded on the disk: none; lz4, zstd or gzip, without loss, with an optional level
    such as zstd:3; int8 or fp8, in half the space but less precise."""
    far_kv_url: str = ""
    """A directory in which workers and cells share the KV of prompts, for requests with the same
    prefix: any URL that fsspec knows, such as file:///mnt/kv or s3://BUCKET/kv. Needs host memory
    for KV, and quire[far]. Empty: none."""
    far_kv_gb: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 100.0
    """Approximate limit on the KV in far-kv-url, in GiB; beyond the limit, the oldest KV is
    deleted. Must be equal on all workers that use this directory."""
    kv_checksum: bool = False
    """Verify the checksum of each block that comes back from host memory; if a block has changed,
    its tokens are recomputed."""
    kv_transfer: Literal["grpc", "nixl"] = "grpc"
    """How KV is read from other workers. grpc: KV comes in messages. nixl: KV is read directly from
    the memory of workers that also use nixl, by RDMA or from process to process; from other workers
    KV comes over gRPC. The value nixl needs quire[nixl]. With nixl, any process that can connect to
    NIXL's ports can read the host memory for KV, regardless of TLS."""
    speculative: Literal["ngram", "draft"] | None = None
    """How to guess next tokens. The model verifies several guesses at a time, and the output does
    not change. ngram: guess the tokens that followed an earlier occurrence of the last few tokens.
    draft: guess the output of draft-model. Unset: no guesses. The worker guesses only while
    guessing saves time."""
    num_draft_tokens: PositiveInt = 4
    """The largest number of tokens guessed at a time; must be less than block-size."""
    draft_model: ModelName | None = None
    """The smaller model that makes the guesses. It must have the vocabulary of the model of
    --model, and is named in the same way."""
    ngram_min: PositiveInt = 2
    """With speculative ngram, the worker searches a sequence for an earlier occurrence of its last
    n tokens. This is the smallest n."""
    ngram_max: PositiveInt = 4
    """The largest n (see ngram-min). The worker takes the largest n for which it finds an earlier
    occurrence."""
    enforce_eager: bool = False
    """Run a GPU's steps without CUDA graphs. The worker starts faster, because it captures no
    graphs, but small models run more slowly. Models that cannot be captured never use graphs."""
    attention_backend: Literal["triton", "flash-attention-3"] = "triton"
    """The implementation of attention on a GPU: Quire's Triton kernels, or FlashAttention-3, which
    must be installed and needs compute capability 9.0. Layers that FlashAttention-3 does not
    support (fp32, quantized KV, MLA, sinks, head dims above 256) use Quire's kernels. The speed
    with FlashAttention-3 is not measured."""
    shared_prefix_attention: bool = False
    """Attend only once per step to blocks with which several sequences begin, if these blocks have
    at least 512 tokens in all. This works only in decode steps that CUDA graphs replay, and only
    for models whose layers all see every token. With this setting, the last bits of a sequence's
    results depend on which other sequences are in the step. The speed is not measured yet."""
    batch_invariant: bool = False
    """On a GPU, make every bit of a result independent of other requests, at the price of speed
    (docs/worker-step.md). This works with Quire's own decoders without experts and without MLA, on
    one device, without LoRA adapters. The setting was tested only in Triton's interpreter, not on a
    GPU. On a CPU, the results of Quire's compiled kernels never depend on other requests, even
    without this setting."""
    num_threads: PositiveInt | None = None
    """Number of threads that compute on a CPU, divided equally among the ranks on this machine.
    Unset: one per physical core that this process may use, but no more than the CPU limit of its
    control group (a container's), rounded up."""
    pin_threads: Literal["on", "off"] = "off"
    """Whether each thread of the kernels in C stays on a physical core of its own, and each part of
    the weights stays in the memory beside the core that reads it. on: the threads stay on the first
    cores that this process may use. Give each worker on a machine its own cores, for example with
    taskset or a container's set of CPUs, because two threads that are pinned to the same core wait
    for each other. The default is off, because the effect was never measured; pinning should help
    on machines with several sockets. Linux only."""
    amx: Literal["auto", "on", "off"] = "auto"
    """Whether linear maps and attention in bfloat16 use Intel's AMX, on a CPU that has it. auto:
    AMX is used if its results are right, and only where it is faster. The worker decides separately
    for each weight format and for attention. At its first start on a machine, the worker checks and
    times AMX, and keeps the outcome in a file for later starts. on: AMX is used if its results are
    right. off: never. AMX changes the last bits of results, so with workers on several machines
    choose on for all workers, or off for all."""
    tensor_parallel_size: PositiveInt = 1
    """Number of devices that split each layer of the model. These devices are one worker, and each
    device holds a part of the weights and KV. The number must divide the model's number of heads
    (docs/parallelism.md)."""
    pipeline_parallel_size: PositiveInt = 1
    """Number of pipeline stages, which work one after another. Each stage has a part of the layers,
    and tensor-parallel-size devices of its own."""
    rank: Annotated[int, Field(ge=0)] = 0
    """The first rank that runs on this machine, if ranks run on several machines. Rank 0 talks to
    the scheduler; all other ranks serve no port."""
    local_ranks: PositiveInt | None = None
    """Number of ranks that run on this machine, from --rank on. Each rank is a process with its own
    device. Unset: all remaining ranks."""
    master_addr: str = "127.0.0.1"
    """Where rank 0 listens for the other ranks. With several machines, this is an address of rank
    0's machine that the other ranks can reach. Nothing but the ranks should be able to reach this
    address, because rank 0 trusts every process that connects."""
    master_port: Port = 0
    """The port on which rank 0 listens; 0 picks a free one. Must be set with several machines."""

    @property
    def num_ranks(self) -> int:
        """Number of processes that run the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_local_ranks(self) -> int:
        """Number of ranks on this machine."""
        return self.local_ranks or self.num_ranks - self.rank

    @property
    def model_id(self) -> str:
        """The model's name in requests."""
        return self.served_model_name or name_of(self.model)

    @property
    def adapter_directories(self) -> tuple[tuple[str, Path], ...]:
        """`lora`, parsed: name and directory of each adapter."""
        return tuple(_parse_adapter(text) for text in self.lora)

    @property
    def adapter_obstacle(self) -> str | None:
        """The setting that rules out adapters; None: no setting does, but the model may."""
        if self.batch_invariant:
            return "batch_invariant"
        return f"model_class, which is {self.model_class}" if self.model_class else None

    @property
    def host_codec(self) -> CodecSpec:
        """`host_kv_codec`, parsed."""
        return parse_codec(self.host_kv_codec)

    @property
    def disk_codec(self) -> CodecSpec:
        """`disk_kv_codec`, parsed."""
        return parse_codec(self.disk_kv_codec)

    @property
    def kv_skip_layers(self) -> frozenset[int]:
        """`kv_cache_dtype_skip_layers`, parsed."""
        return _parse_layers(self.kv_cache_dtype_skip_layers)

    @property
    def kv_dtype(self) -> str:
        """`kv_cache_dtype`, and the layers that are not quantized: for example "int8 but 0,23"."""
        layers = ",".join(map(str, sorted(self.kv_skip_layers)))
        return f"{self.kv_cache_dtype} but {layers}" if layers else self.kv_cache_dtype

    @field_validator("lora", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return split_at_commas(value)

    @field_validator("lora")
    @classmethod
    def _are_adapters(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        names = [name for name, _ in map(_parse_adapter, texts)]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"has {name!r} {names.count(name)} times; names must differ")
        return texts

    @field_validator("kv_cache_dtype_skip_layers")
    @classmethod
    def _is_a_list_of_layers(cls, text: str) -> str:
        _parse_layers(text)
        return text

    @field_validator("host_kv_codec", "disk_kv_codec")
    @classmethod
    def _is_a_codec(cls, text: str) -> str:
        parse_codec(text)
        return text

    @field_validator("host_kv_codec")
    @classmethod
    def _has_a_fixed_ratio(cls, text: str) -> str:
        if parse_codec(text).is_lossless:
            raise ValueError(
                "must be none, int8 or fp8: the space that a lossless codec saves is not known in"
                " advance, so it would add no blocks; disk_kv_codec may be lossless"
            )
        return text

    @model_validator(mode="after")
    def _can_be_loaded_later(self) -> Self:
        if self.unloaded and self.num_ranks > 1:
            raise ValueError(
                "unloaded is true; it must be false with tensor_parallel_size or"
                " pipeline_parallel_size"
            )
        return self

    @model_validator(mode="after")
    def _disk_is_below_the_host(self) -> Self:
        if self.disk_kv_memory_gb and self.host_kv_memory_gb == 0:
            raise ValueError(
                f"disk_kv_memory_gb is {self.disk_kv_memory_gb}; it must be 0 without"
                " host_kv_memory_gb, through which KV gets to the disk"
            )
        if self.far_kv_url and (self.host_kv_memory_gb == 0 or self.num_ranks > 1):
            obstacle = "host_kv_memory_gb 0" if self.num_ranks == 1 else f"{self.num_ranks} ranks"
            raise ValueError(
                f"far_kv_url is {self.far_kv_url}; it must be empty with {obstacle}: KV gets there"
                " through the host memory of one device"
            )
        host, disk = self.host_codec, self.disk_codec
        if host.is_quantized and disk.is_quantized and host != disk:
            raise ValueError(
                f"disk_kv_codec is {disk}; it must not quantize again where host_kv_codec is {host}"
            )
        return self

    @model_validator(mode="after")
    def _can_move_requests(self) -> Self:
        if self.role is not Role.BOTH and (self.host_kv_memory_gb == 0 or self.num_ranks > 1):
            obstacle = "host_kv_memory_gb 0" if self.num_ranks == 1 else f"{self.num_ranks} ranks"
            raise ValueError(
                f"role is {self.role}; it must be both with {obstacle}, since requests move between"
                " workers through the host memory of one device"
            )
        return self

    @model_validator(mode="after")
    def _shares_prefixes_in_graphs(self) -> Self:
        for name, wanted in (
            ("attention_backend", "triton"),
            ("enforce_eager", False),
            ("speculative", None),
        ):
            if self.shared_prefix_attention and (given := getattr(self, name)) != wanted:
                raise ValueError(
                    f"{name} is {given}; with shared_prefix_attention it must be {wanted}: our"
                    " kernels share prefixes, in CUDA graphs of decodes"
                )
        return self

    @model_validator(mode="after")
    def _is_batch_invariant_in_all_parts(self) -> Self:
        for name, wanted in (
            ("attention_backend", "triton"),
            ("shared_prefix_attention", False),
            ("model_class", ""),
            ("lora", ()),
            ("tensor_parallel_size", 1),
            ("pipeline_parallel_size", 1),
        ):
            if self.batch_invariant and (given := getattr(self, name)) != wanted:
                raise ValueError(
                    f"{name} is {given}; with batch_invariant it must be {wanted or 'unset'}: its"
                    " results depend on the batch"
                )
        for name, codec in (("host", self.host_codec), ("disk", self.disk_codec)):
            if self.batch_invariant and codec.is_quantized:
                raise ValueError(
                    f"{name}_kv_codec is {codec}; with batch_invariant it must not quantize: which"
                    " KV goes there depends on other requests"
                )
        return self

    @model_validator(mode="after")
    def _warns_first(self) -> Self:
        warning, critical = self.memory_warning_share, self.memory_critical_share
        if warning is not None and critical is not None and critical > warning:
            raise ValueError(
                f"memory_critical_share is {critical}; it must be at most memory_warning_share,"
                f" {warning}"
            )
        return self

    @model_validator(mode="after")
    def _is_quantized_once(self) -> Self:
        if self.kv_cache_dtype == "auto":
            if self.kv_cache_dtype_skip_layers:
                raise ValueError(
                    f"kv_cache_dtype_skip_layers is {self.kv_cache_dtype_skip_layers}; it must be"
                    " empty where kv_cache_dtype is auto"
                )
            return self
        for name, codec in (("host", self.host_codec), ("disk", self.disk_codec)):
            if codec.is_quantized:
                raise ValueError(
                    f"{name}_kv_codec is {codec}; it must not quantize again where"
                    f" kv_cache_dtype is {self.kv_cache_dtype}"
                )
        return self

    @model_validator(mode="after")
    def _ranks_are_of_the_group(self) -> Self:
        num_ranks, end = self.num_ranks, self.rank + self.num_local_ranks
        if self.rank >= num_ranks:
            raise ValueError(
                f"rank is {self.rank}; with tensor_parallel_size {self.tensor_parallel_size} and"
                f" pipeline_parallel_size {self.pipeline_parallel_size} it must be at most"
                f" {num_ranks - 1}"
            )
        if end > num_ranks:
            raise ValueError(
                f"local_ranks is {self.local_ranks}; from rank {self.rank} on there are"
                f" {num_ranks - self.rank}"
            )
        if self.num_local_ranks < num_ranks and not self.master_port:
            raise ValueError(
                "master_port is 0; it must be set where not all ranks run on this machine"
            )
        return self

    @model_validator(mode="after")
    def _ranks_share_nothing_else(self) -> Self:
        if self.num_ranks == 1:
            return self
        if self.disk_kv_memory_gb:
            raise ValueError(
                f"disk_kv_memory_gb is {self.disk_kv_memory_gb}; it must be 0 with"
                " tensor_parallel_size or pipeline_parallel_size"
            )
        if self.max_kv_memory_gb:
            raise ValueError(
                f"max_kv_memory_gb is {self.max_kv_memory_gb}; it must be 0 with"
                " tensor_parallel_size or pipeline_parallel_size"
            )
        if ":" in self.device and self.num_local_ranks > 1:
            raise ValueError(
                f"device is {self.device}, which is one GPU, but {self.num_local_ranks} ranks run"
                " here: set it to cuda, and choose among GPUs with CUDA_VISIBLE_DEVICES"
            )
        # Ranks would guess different numbers of tokens, because their clocks differ.
        if self.speculative is not None:
            raise ValueError(
                f"speculative is {self.speculative}; it must be unset with tensor_parallel_size or"
                " pipeline_parallel_size"
            )
        return self

    @model_validator(mode="after")
    def _takes_adapters(self) -> Self:
        if not self.lora:
            return self
        if (obstacle := self.adapter_obstacle) is not None:
            raise ValueError(f"lora is {','.join(self.lora)}; it must be unset with {obstacle}")
        if self.model_id in dict(self.adapter_directories):
            raise ValueError(
                f"lora has {self.model_id!r}, which is the model's name in requests; names must"
                " differ"
            )
        return self

    @model_validator(mode="after")
    def _can_guess(self) -> Self:
        if (self.speculative == "draft") != (self.draft_model is not None):
            given = "unset" if self.draft_model is None else self.draft_model
            raise ValueError(
                f"draft_model is {given}; it must be set if speculative is draft, and only then"
            )
        if self.draft_model is not None and self.max_kv_memory_gb:
            raise ValueError(
                f"max_kv_memory_gb is {self.max_kv_memory_gb}; it must be 0 with draft_model, whose"
                " KV has as many blocks"
            )
        if self.speculative is not None and self.num_draft_tokens >= self.block_size:
            raise ValueError(
                f"num_draft_tokens is {self.num_draft_tokens}; it must be less than block_size,"
                f" {self.block_size}"
            )
        if self.ngram_min > self.ngram_max:
            raise ValueError(
                f"ngram_min is {self.ngram_min}; it must be at most ngram_max, {self.ngram_max}"
            )
        return self

    @model_validator(mode="after")
    def _fits_a_step(self) -> Self:
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if seqs is not None and tokens is not None and tokens < seqs:
            raise ValueError(
                f"max_num_batched_tokens is {tokens}; it must be at least max_num_seqs, {seqs}"
            )
        return self


def _parse_adapter(text: str) -> tuple[str, Path]:
    name, _, directory = text.partition("=")
    if not directory or not is_adapter_name(name):
        raise ValueError(f"must be NAME=DIR, such as sql=adapters/sql; {text!r} is not")
    return name, Path(directory)


def _parse_layers(text: str) -> frozenset[int]:
    numbers = text.split(",") if text else []
    for number in numbers:
        if not (number.isascii() and number.isdecimal()):
            raise ValueError(
                f"must be numbers of layers, such as 0,1,23; {number!r} is not a number"
            )
    return frozenset(map(int, numbers))
