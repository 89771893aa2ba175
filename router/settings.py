"""The router's settings."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import NoDecode

from contract.request import MAX_STREAM_INTERVAL
from model_files.errors import ModelError
from model_files.locate import DEFAULT_CACHE_DIR, ModelPlace, name_of, place_of
from model_files.old_tokenizer import has_tokenizer
from router.access.api_keys import ApiKeys, read_keys_file
from router.parsers.choosing import choose_parsers
from router.text.chat_settings import ChatSettings
from rpc.peers.discovery import check_targets
from rpc.security.tls import ClientTls, check_certificate
from rpc.settings import ModelName, Port, PositiveInt, ProcessSettings, split_at_commas

_CELL: Final = re.compile(r"(?P<name>[^=]+)=(?P<model>.+)@(?P<schedulers>[^@]+)")
"""One model of --cell. The last @ separates the model from the schedulers."""


@dataclass(frozen=True, slots=True)
class CellSettings:
    """A model and its schedulers."""

    name: str
    """The name that requests use."""
    model: str
    schedulers: tuple[str, ...]


class RouterSettings(ProcessSettings):
    """A router's flags and environment variables."""

    model: ModelName
    """The model: a Hugging Face directory, a GGUF file, a name on the Hugging Face hub such as
    Qwen/Qwen3-0.6B, or a URL such as s3://BUCKET/DIRECTORY (docs/models.md). The router reads the
    model's tokenizer and chat template."""
    cache_dir: Path = DEFAULT_CACHE_DIR
    """Directory for files made from GGUF files or older tokenizers, or downloaded from URLs.
    Models from the hub are in the hub's own cache (HF_HOME)."""
    served_model_name: str = ""
    """The name that requests use; empty: the name of the directory or GGUF file, or the model's
    name on the hub."""
    scheduler: Annotated[tuple[str, ...], NoDecode] = ("127.0.0.1:50052",)
    """Addresses of the schedulers, separated by commas: host:port or unix:/path. dns:HOST:PORT
    stands for all addresses of a host name, such as the name of a headless service in Kubernetes.
    These addresses may change while the router runs. Several schedulers, each with its own workers,
    share the requests. A standby takes over the requests of the scheduler that it replaces."""
    cell: Annotated[tuple[str, ...], NoDecode] = ()
    """A further model behind the same ports, as NAME=MODEL@SCHEDULER[,SCHEDULER...]. NAME is the
    name that requests use; MODEL and SCHEDULER are as in --model and --scheduler. May be repeated.
    A request that names no model goes to the model of --model (docs/operations.md)."""
    on_demand: PositiveInt | None = None
    """Maximum number of models that are loaded at once. If this many are loaded and a request needs
    a further model, the router first unloads the least recently used one. Later requests for the
    unloaded model wait until it is loaded again. Start the workers with --unloaded, and start only
    one router. Unset: only operators load models."""
    min_loaded_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 10.0
    """With --on-demand, the minimum time in seconds for which a model stays loaded, even if
    requests need other models."""
    idle_unload_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Time in seconds without a request after which a model is unloaded; the next request for the
    model waits until the model is loaded again. Only one router may have this flag. Unset: idle
    models stay loaded."""
    discovery_interval_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 5.0
    """Interval in seconds at which dns: names are resolved."""
    http_port: Port = 8000
    """Port of HTTP, with OpenAI's API; 0 picks a free one."""
    grpc_port: Port = 50051
    """Port of gRPC; 0 picks a free one."""
    grpc_server: Literal["quire", "grpcio"] = "quire"
    """The gRPC server: quire or grpcio. quire is Quire's own server. It sends all pending tokens of
    a connection in one write, and so takes much less CPU time. It also limits how many frames
    without a request or data, such as pings, a client may send. grpcio is the server of the gRPC
    library."""
    vllm_engine: bool = False
    """Whether to serve the engine contract of the Shepherd Model Gateway by gRPC:
    `vllm.grpc.engine.VllmEngine` (docs/fleet.md)."""
    openengine: bool = False
    """Whether to serve `openengine.v1`, the experimental gRPC contract of the OpenEngine project as
    of its release v0.1.0 (docs/fleet.md)."""
    shared_http_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """An additional HTTP port that several routers on one machine share; they then also share
    --grpc-port. Each router gets some of the connections, and needs its own --http-port."""
    scheduler_tls_cert: Path | None = None
    """PEM file with the certificate that the router shows to schedulers. Unset: --tls-cert. Set
    this flag if --tls-cert is a public certificate, because schedulers with --tls-client-ca accept
    only certificates that an authority in that file has signed."""
    scheduler_tls_key: Path | None = None
    """PEM file with the private key of --scheduler-tls-cert."""
    max_live_requests: Annotated[int, Field(ge=1, le=1_000_000)] = 4096
    """Maximum number of live requests: running, waiting, or not yet read to the end by the
    client."""
    max_body_mb: Annotated[int, Field(ge=1, le=1024)] = 1
    """Maximum size in MiB of an HTTP request's body, before and after decompression, and of a gRPC
    message with a prompt or tokens."""
    accept_compressed: bool = False
    """Whether HTTP bodies (Content-Encoding) and gRPC messages (grpc-encoding) may be compressed
    with gzip or deflate."""
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = ()
    """Further names, separated by commas, that a call's Host header may have, such as the name of a
    proxy in front of the router. A router checks this header only if it has neither API keys nor
    TLS (docs/security.md). localhost, loopback addresses and --host are always allowed."""
    allowed_origins: Annotated[tuple[str, ...], NoDecode] = ()
    """Origins such as https://example.com, separated by commas, whose web pages may call a router
    that has no API keys. The router's own web page may always call the router."""
    tool_parser: str = ""
    """The syntax of the model's tool calls: a family (docs/clients.md), none, or your class as
    package.module:Class; empty: detected from the model's chat template."""
    reasoning_parser: str = ""
    """The syntax of the model's thinking: a family (docs/clients.md), none, or your `Thinking`
    object as package.module:NAME; empty: detected from the model's chat template."""
    trust_request_chat_template: bool = False
    """Whether chats may set chat_template. Such a template runs in a sandbox, but without a time
    limit."""
    api_key: Annotated[tuple[SecretStr, ...], NoDecode] = ()
    """API keys of operators, separated by commas. These keys have no tenant and allow every call.
    If the router has keys, each call must have one (authorization: Bearer KEY). Set the keys in the
    environment, because other users can see the command line."""
    api_keys_file: Path | None = None
    """TOML file of API keys, their tenants, and the tenants' quotas (docs/security.md)."""
    ui: bool = True
    """Whether to serve a web page at /ui, with a view of the running service and a playground."""
    turn_store: str = ""
    """Where responses, batches and usage are stored (docs/failure.md): a file for SQLite, or
    postgresql://… for several routers (quire[postgres]); empty: nothing is stored. Put a password
    in PGPASSWORD or ~/.pgpass, because other users can see the command line."""
    turn_retention_days: Annotated[float, Field(gt=0, le=36500)] = 30.0
    """How many days a response is kept after its end, and a file or an ended batch after its
    creation."""
    usage_retention_days: Annotated[float, Field(gt=0, le=36500)] = 400.0
    """How many days usage (`quire usage`) is kept; without --turn-store it is not kept at all."""
    audit_log: Path | None = None
    """File for the prompt and the outputs of every request, one JSON object per line. Each router
    needs a separate file. Unset: prompts and outputs are not logged."""
    audit_log_max_mb: Annotated[int, Field(ge=1, le=1_000_000)] = 100
    """Size in MiB at which --audit-log is renamed to FILE.1, FILE.1 to FILE.2, and so on."""
    audit_log_files: Annotated[int, Field(ge=2, le=10_000)] = 10
    """How many files of --audit-log to keep, including the current one; the oldest is deleted."""
    trace_sample_ratio: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Which share of the requests without a traceparent is traced (with --otlp-traces-endpoint)."""
    stream_interval: Annotated[int, Field(ge=1, le=MAX_STREAM_INTERVAL)] = 1
    """How many new tokens of an output are sent together, unless the request sets stream_interval.
    Fewer and larger events cost less. An output's first token and its last tokens are sent without
    waiting for more tokens."""
    tokenizer_threads: Annotated[int, Field(ge=1, le=64)] = 2
    """Number of threads that tokenize prompts."""

    @field_validator("model")
    @classmethod
    def _model_is_readable(cls, model: str) -> str:
        _check_model(model)
        return model

    @field_validator("cell", mode="before")
    @classmethod
    def _split_cells(cls, value: object) -> object:
        """Split at commas, except between the schedulers of one cell."""
        parts = split_at_commas(value)
        if not isinstance(parts, tuple):
            return value
        cells: list[str] = []
        for part in parts:
            if cells and not _CELL.fullmatch(part) and _CELL.fullmatch(cells[-1]):
                cells[-1] += f",{part}"
            else:
                cells.append(part)
        return tuple(cells)

    @field_validator("cell")
    @classmethod
    def _cells_are_right(cls, cells: tuple[str, ...]) -> tuple[str, ...]:
        for text in cells:
            if (found := _CELL.fullmatch(text)) is None:
                raise ValueError(f"{text!r} must be NAME=MODEL@SCHEDULER[,SCHEDULER...]")
            _check_model(found["model"])
            check_targets(found["schedulers"].split(","))
        return cells

    @model_validator(mode="after")
    def _cells_have_different_names(self) -> Self:
        names = [cell.name for cell in self.cells]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"--cell: {twice[0]}: two models have this name")
        if self.on_demand is not None and not self.cell:
            raise ValueError(f"--on-demand: {self.on_demand}: needs several models (--cell)")
        for flag in ("vllm_engine", "openengine"):
            if self.cell and getattr(self, flag):
                name = flag.replace("_", "-")
                raise ValueError(f"--{name}: it serves one model, and cannot be used with --cell")
        return self

    @property
    def cells(self) -> Sequence[CellSettings]:
        """All models with their schedulers; the model of --model comes first."""
        cells = [CellSettings(self.model_name, self.model, self.scheduler)]
        for found in filter(None, map(_CELL.fullmatch, self.cell)):
            schedulers = tuple(found["schedulers"].split(","))
            cells.append(CellSettings(found["name"], found["model"], schedulers))
        return cells

    def read_api_keys(self) -> ApiKeys | None:
        """Return the API keys; None: calls need no key. A bad file raises `ApiKeysError`."""
        if not self.api_key and self.api_keys_file is None:
            return None
        file = None if self.api_keys_file is None else read_keys_file(self.api_keys_file)
        return ApiKeys([key.get_secret_value() for key in self.api_key], file)

    @field_validator("api_key", "scheduler", "allowed_hosts", "allowed_origins", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return split_at_commas(value)

    @field_validator("scheduler")
    @classmethod
    def _can_be_found(cls, scheduler: tuple[str, ...]) -> tuple[str, ...]:
        check_targets(scheduler)
        return scheduler

    @model_validator(mode="after")
    def _keys_can_be_read(self) -> Self:
        self.read_api_keys()
        return self

    @property
    def chats(self) -> ChatSettings:
        """The settings of chats."""
        return ChatSettings(
            self.tool_parser, self.reasoning_parser, self.trust_request_chat_template
        )

    @model_validator(mode="after")
    def _parsers_are_known(self) -> Self:
        choose_parsers("", self.tool_parser, self.reasoning_parser)
        return self

    @property
    def client_tls(self) -> ClientTls | None:
        """TLS for connections to schedulers; None: no TLS."""
        tls = super().client_tls
        if tls is None or self.scheduler_tls_cert is None:
            return tls
        return replace(tls, cert=self.scheduler_tls_cert, key=self.scheduler_tls_key)

    @model_validator(mode="after")
    def _scheduler_tls_is_whole(self) -> Self:
        cert, key = self.scheduler_tls_cert, self.scheduler_tls_key
        if (cert is None) != (key is None):
            raise ValueError("--scheduler-tls-cert and --scheduler-tls-key need each other")
        if cert is not None and key is not None:
            if self.tls_ca is None:
                raise ValueError("--scheduler-tls-cert needs --tls-ca")
            check_certificate(cert, key)
        return self

    @property
    def model_name(self) -> str:
        """The name that requests use."""
        return self.served_model_name or name_of(self.model)


def _check_model(model: str) -> None:
    try:
        place = place_of(model)
    except ModelError as error:
        raise ValueError(str(error)) from error
    if place is ModelPlace.DIRECTORY and not has_tokenizer(Path(model)):
        raise ValueError("a directory must have a tokenizer.json, or an older form of tokenizer")
