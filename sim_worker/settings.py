"""Settings of simulated workers."""

import socket
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import NoDecode

from model_files.locate import DEFAULT_CACHE_DIR, name_of
from rpc.settings import ModelName, Port, PositiveInt, ProcessSettings

NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]

_GIB = 1024**3


class SimWorkerSettings(ProcessSettings):
    """Simulates workers: executes a scheduler's steps in the time that a device would take.

    The tokens are random, but the same for the same seed. By default the device is an H100 SXM with
    a model of 8 billion parameters in bfloat16.
    """

    grpc_port: Port = 50053
    """Port of gRPC; 0 picks a free one. With --count, the port of the first worker; the next ports
    belong to the others."""
    uds: Path | None = None
    """Path of a Unix socket for gRPC, instead of host and port. With --count above 1, the path of
    worker I gets -I before its suffix: worker.sock becomes worker-0.sock, worker-1.sock and so on.
    """
    http_port: Port = 8002
    """Port of HTTP, for probes and metrics; 0 picks a free one."""
    count: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of workers in this process."""
    worker_id: str = Field(default_factory=socket.gethostname)
    """The worker's name in logs and at the scheduler; with --count above 1, -I is added."""
    model: ModelName | None = None
    """A model, named as for a worker, whose config.json gives the vocabulary, the end tokens and
    the length; no weights are read. Unset: the flags below give these values."""
    cache_dir: Path = DEFAULT_CACHE_DIR
    """Directory for files made from GGUF files or older tokenizers, or downloaded from URLs.
    Models from the hub are in the hub's own cache (HF_HOME)."""
    served_model_name: str = ""
    """Name of the model in requests; empty: the directory's name, or "simulated"."""
    vocab_size: PositiveInt | None = None
    """Number of token ids; unset: as in the model, or 32000."""
    eos_token_ids: Annotated[tuple[int, ...], NoDecode] = ()
    """The ids of the end tokens, such as 1,2; unset: as in the model."""
    max_model_len: PositiveInt | None = None
    """The largest number of tokens in a sequence, prompt and output; unset: as in the model, or
    8192."""
    structured_output: bool = False
    """Whether requests may ask for structured output; the tokens are random nevertheless."""
    max_num_seqs: PositiveInt = 256
    """At most this many sequences run at once."""
    max_num_batched_tokens: PositiveInt = 2048
    """The largest number of tokens in one step."""
    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    """Number of token slots in one block of KV memory."""
    num_blocks: PositiveInt = 26_000
    """Number of blocks of KV memory."""
    max_num_blocks: PositiveInt | None = None
    """The number of blocks to which `quire resize` can grow the KV memory; at least num-blocks;
    unset: num-blocks."""
    params_b: PositiveFloat = 8.0
    """Number of the model's parameters, in billions; each has two bytes."""
    bandwidth_gb_s: PositiveFloat = 3350.0
    """How fast the device reads its memory, in GB/s."""
    tflops: PositiveFloat = 500.0
    """How fast the device computes, in 10^12 operations per second; a token takes two operations
    per parameter."""
    kv_bytes_per_token: PositiveInt = 131_072
    """Size of one token's KV, in bytes."""
    host_kv_memory_gb: NonNegativeFloat = 0.0
    """Host memory in GiB for KV that does not fit on the device; 0: none."""
    swap_gb_s: PositiveFloat = 50.0
    """How fast KV moves between device and host in each direction, in GB/s."""
    disk_kv_memory_gb: NonNegativeFloat = 0.0
    """Disk space in GiB for KV; 0: none. Needs host memory for KV."""
    disk_gb_s: PositiveFloat = 5.0
    """How fast KV moves between host and disk in each direction, in GB/s."""
    speedup: PositiveFloat = 1.0
    """Factor by which the simulation is faster than the device."""
    mean_output_len: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """Average number of tokens after which sequences end with an end token; unset: sequences run to
    their maximum length."""

    script: Path | None = None
    """A JSON file with lists of token ids that replace the random tokens: a request whose prompt
    has N end tokens gets list N, counted from 0, and then an end token."""

    @field_validator("eos_token_ids", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(value.split(",")) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _fits(self) -> Self:
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if tokens < seqs:
            raise ValueError(
                f"max_num_batched_tokens is {tokens}; it must be at least max_num_seqs, {seqs}"
            )
        if self.max_num_blocks is not None and self.max_num_blocks < self.num_blocks:
            raise ValueError(
                f"max_num_blocks is {self.max_num_blocks}; it must be at least num_blocks,"
                f" {self.num_blocks}"
            )
        if self.disk_kv_memory_gb and not self.num_host_blocks:
            raise ValueError(
                f"disk_kv_memory_gb is {self.disk_kv_memory_gb}; it must be 0 without"
                " host_kv_memory_gb, through which KV gets to the disk"
            )
        if self.count > 1 and self.uds is None and not 0 < self.grpc_port <= 65536 - self.count:
            raise ValueError(
                f"grpc_port is {self.grpc_port}; {self.count} workers need that many ports from it"
            )
        return self

    @property
    def model_id(self) -> str:
        """The name that requests use for the model."""
        name = name_of(self.model) if self.model is not None else "simulated"
        return self.served_model_name or name

    @property
    def block_bytes(self) -> int:
        """Size of one block's KV, in bytes."""
        return self.block_size * self.kv_bytes_per_token

    @property
    def num_host_blocks(self) -> int:
        """Number of host blocks."""
        return int(self.host_kv_memory_gb * _GIB) // self.block_bytes

    @property
    def num_disk_blocks(self) -> int:
        """Number of disk blocks."""
        return int(self.disk_kv_memory_gb * _GIB) // self.block_bytes

    def of_worker(self, index: int) -> Self:
        """Return the settings of one worker, with `count` 1."""
        if self.count == 1:
            return self
        uds = self.uds
        if uds is not None:
            uds = uds.with_name(f"{uds.stem}-{index}{uds.suffix}")
        return self.model_copy(
            update={
                "count": 1,
                "uds": uds,
                "grpc_port": self.grpc_port + index,
                "worker_id": f"{self.worker_id}-{index}",
            }
        )
