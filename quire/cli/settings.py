"""The settings of all subcommands except `up`: flags, environment variables and defaults."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, CliPositionalArg, NoDecode, SettingsConfigDict

from model_files.locate import DEFAULT_CACHE_DIR
from rpc.settings import ENV_PREFIX, LinkSettings, PositiveInt, split_at_commas

ServicePort = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class RouterClientSettings(LinkSettings):
    """The flags of all commands that call a router."""

    api_key: SecretStr = SecretStr("")
    """The API key, if the router requires one. Prefer the environment variable QUIRE_API_KEY to
    this flag, since other users can see a command line."""


class RouterTargetSettings(RouterClientSettings):
    """The flags that select a router."""

    target: str = ""
    """The router's gRPC address: host:port, or unix:/path; empty: the router of the only service on
    this machine, else 127.0.0.1:50051."""
    http_port: ServicePort | None = None
    """Choose the service on this machine by its router's HTTP port; default: the only service."""


class ClientSettings(RouterTargetSettings):
    """The flags that `generate` and `chat` share."""

    served_model_name: str = ""
    """The model's name; empty: the only served model."""
    max_tokens: PositiveInt | None = None
    """Maximum number of tokens to generate; default: as many as fit the context."""
    temperature: float | None = None
    """Randomness of the sampling; 0 always chooses the likeliest token; default: 1."""
    top_p: float | None = None
    """Sample from the likeliest tokens that together have this probability; default: all tokens."""
    top_k: int = 0
    """Sample from this many of the likeliest tokens; 0: all tokens."""
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    """Seed of the random draws; the same seed gives the same output."""
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """The request's time limit, in seconds; default: none."""


class EmbedSettings(RouterTargetSettings):
    """Turn texts into embeddings, and print each embedding as a JSON list on one line."""

    texts: CliPositionalArg[tuple[str, ...]]
    """The texts; `-` stands for the lines of standard input."""
    served_model_name: str = ""
    """The model's name; empty: the only served model."""
    pooling: Literal["last", "mean", "cls"] | None = None
    """Which hidden states become the embedding: the last token's, the mean of all tokens', or the
    first token's (cls); default: the model's choice."""
    normalize: bool | None = None
    """Whether to scale embeddings to length 1; default: the model's choice."""
    dimensions: PositiveInt | None = None
    """How many elements of each embedding to keep; default: all."""


class GenerateSettings(ClientSettings):
    """Continue a prompt, streaming."""

    prompt: CliPositionalArg[str]
    """The text to continue; `-` stands for standard input."""
    n: PositiveInt = 1
    """Number of outputs; if there are several, each is shown when it is complete."""
    beam_width: Annotated[int, Field(ge=2, le=10)] | None = None
    """Number of beams of a beam search; default: no beam search, but sampling."""
    length_penalty: Annotated[float, Field(ge=-5, le=5)] = 1.0
    """With --beam-width: values above 0 favour longer outputs."""
    early_stopping: Literal["false", "true", "never"] = "false"
    """With --beam-width: when the beam search stops; the values are those of `early_stopping` in
    transformers."""
    stop: str = ""
    """Text that ends the output; empty: none."""
    cache_pin_s: Annotated[float, Field(gt=0, le=86400)] | None = None
    """Protect the prompt's KV from eviction for this many seconds."""
    ignore_eos: bool = False
    """Continue past the model's end-of-text token."""

    @model_validator(mode="after")
    def _search_has_a_width(self) -> Self:
        fields = type(self).model_fields
        for name in ("length_penalty", "early_stopping"):
            if self.beam_width is None and getattr(self, name) != fields[name].default:
                raise ValueError(f"--{name.replace('_', '-')} needs --beam-width")
        return self


class ChatSettings(ClientSettings):
    """Chat with the model, streaming.

    /new starts a new conversation; /quit or Ctrl-D ends the command.
    """

    system: str = ""
    """The system message at the start of the conversation."""


class BatchSettings(RouterClientSettings):
    """Answer a file of requests: one JSON object per line, with custom_id, url and body.

    Answers are written as they arrive. Run the same command again to continue after an
    interruption: lines that are already answered are skipped. The requests have the lowest
    priority. Without --url and --model, the command uses the service on this machine.
    """

    model_config = SettingsConfigDict(cli_shortcuts={"output": "o"})

    file: CliPositionalArg[Path]
    """The file of requests, in the format of OpenAI's batches."""
    output: Path
    """Where to write the answers, in the format of OpenAI's batches."""
    url: str = ""
    """URL of a running service, such as http://10.0.0.1:8000."""
    http_port: ServicePort | None = None
    """Choose the service on this machine by its router's HTTP port; default: the only service."""
    model: str = ""
    """Start a service for this model, and stop it afterwards."""
    concurrency: PositiveInt = 64
    """Maximum number of requests that run at once."""

    @model_validator(mode="after")
    def _there_is_one_service(self) -> Self:
        given = {"--url": self.url, "--model": self.model, "--http-port": self.http_port}
        names = [name for name, value in given.items() if value]
        if len(names) > 1:
            raise ValueError(f"{' and '.join(names)}: each names a service; give one")
        return self


class BenchSettings(RouterClientSettings):
    """Measure a service with streaming requests, whose prompts are meaningless tokens.

    Up to --concurrency requests run at a time; when one ends, the next one starts. Without
    --target, the command starts a service for the measurement, and stops it afterwards.
    """

    target: str = ""
    """The gRPC address of a running service: host:port, or unix:/path; empty: start a service."""
    model: Path | None = None
    """The model of the service to start; default: the small model that Quire ships."""
    concurrency: PositiveInt = 8
    """Number of concurrent streams."""
    num_prompts: PositiveInt = 64
    """Total number of requests."""
    input_len: PositiveInt = 128
    """Tokens per prompt."""
    output_len: PositiveInt = 64
    """Tokens per output."""
    profile: Path | None = None
    """Write a timeline of all processes to this file, for ui.perfetto.dev, and show how much time
    each process spent in each kind of span. Not allowed with --target."""

    @model_validator(mode="after")
    def _profile_needs_its_own_service(self) -> Self:
        if self.target and (self.profile or self.model):
            flag = "--profile" if self.profile else "--model"
            raise ValueError(f"{flag}: the command must start the service; leave out --target")
        return self


class StatusSettings(RouterTargetSettings):
    """Show the processes of services, each with its health, and the load of each service.

    Exits with 0 if all processes are ready and the load can be read.
    """

    target: str = ""
    """Show only the load of the service whose router has this gRPC address (host:port or
    unix:/path); empty: show the services on this machine."""
    http_port: ServicePort | None = None
    """Choose the service on this machine by its router's HTTP port; default: all services."""


class KvSettings(RouterTargetSettings):
    """For each worker, show a map of the KV blocks, and the live sequences with their blocks."""

    worker: str = ""
    """Show only the worker with this address; empty: all workers."""
    first_block: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """The number of the first block to show."""
    first_seq_id: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Show the sequences from this number on; the numbers are in the column `seq`."""
    max_sequences: Annotated[int, Field(ge=0, le=1024)] = 256
    """Maximum number of sequences to show per worker."""
    json_: Annotated[bool, Field(alias="json")] = False
    """Print JSON, with block tables and reference counts."""


class TopSettings(RouterTargetSettings):
    """Watch a service: queues, sequences, KV tiers, and the work of each worker. q quits.

    Latencies and refusals come from the router's HTTP port, so they are shown only for services on
    this machine.
    """

    interval_s: Annotated[float, Field(gt=0, le=3600)] = 1.0
    """Seconds between two frames; rates are averages over that time."""
    once: bool = False
    """Print one frame after one interval, and exit."""
    max_sequences: Annotated[int, Field(ge=0, le=1024)] = 256
    """Maximum number of sequences to query per worker; the terminal shows as many as fit."""


class _ChosenRequests(RouterTargetSettings):
    """The flags that `requests` and `cancel` share."""

    tenant: str | None = None
    """Only requests of this tenant."""
    older_than_s: Seconds | None = None
    """Only requests that arrived at least this many seconds ago."""


class UsageSettings(RouterTargetSettings):
    """Show how many requests and tokens the router's store (--turn-store) has recorded.

    This command is for operators.
    """

    since: str = "24h"
    """The beginning of the period: an age such as 90m, 24h or 30d, or a time such as 2026-11-01 or
    2026-11-01T08:00+01:00. A time without an offset is in UTC. The hour that contains the beginning
    counts as a whole."""
    until: str = ""
    """The end of the period, as an age or a time; empty: now."""
    by: Annotated[tuple[str, ...], NoDecode] = ("tenant", "model")
    """What to group the numbers by, separated by commas: hour, day, tenant, key, model, adapter."""
    json_: Annotated[bool, Field(alias="json")] = False
    """Print one JSON object for each row."""

    @field_validator("by", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return split_at_commas(value)


class RequestsSettings(_ChosenRequests):
    """List the live requests of a service's routers, with tenant, age and progress.

    This command is for operators. `quire kv` shows the blocks of each request's sequences.
    """

    json_: Annotated[bool, Field(alias="json")] = False
    """Print one JSON object for each request."""


class CancelSettings(_ChosenRequests):
    """End live requests of a service's routers: by id, tenant or age, or all.

    This command is for operators. A request ends if it meets all given conditions. The request's
    client gets an error, and should not send the request again.
    """

    request_ids: CliPositionalArg[tuple[str, ...]] = ()
    """Ids of requests, as `quire requests` shows them."""
    all: bool = False
    """End all requests."""

    @model_validator(mode="after")
    def _chooses(self) -> Self:
        if not (self.request_ids or self.all) and self.tenant is None and self.older_than_s is None:
            raise ValueError("give ids, --tenant, --older-than-s or --all")
        return self


class SchedulerClientSettings(LinkSettings):
    """The flags of all commands that call a scheduler."""

    scheduler: str = ""
    """The scheduler's gRPC address: host:port, or unix:/path; empty: the scheduler of the
    service on this machine."""
    http_port: ServicePort | None = None
    """Choose the service on this machine by its router's HTTP port; default: the only service."""
    served_model: str = ""
    """The model whose scheduler to call; required if the service has several models."""


class DefragmentSettings(SchedulerClientSettings):
    """Move held KV blocks to the low end of each worker's pool; the workers continue to serve."""

    scheduler: str = ""
    """The scheduler's gRPC address: host:port, or unix:/path; empty: the scheduler of the only
    service on this machine, else 127.0.0.1:50052."""


class ResizeSettings(SchedulerClientSettings):
    """Resize a worker's KV pool while the worker runs, for example to make room for another model.

    Before a pool shrinks, the KV in the blocks beyond its new end moves to other blocks. If there
    is not enough room for this KV, sequences are preempted. Set --blocks or --gib.
    """

    worker: str = ""
    """The worker's address, as `quire kv` shows it; empty: the only worker of the scheduler."""
    blocks: Annotated[int, Field(ge=1)] | None = None
    """The new number of device blocks."""
    gib: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """The new total size of the device blocks, in GiB."""

    @model_validator(mode="after")
    def _has_one_size(self) -> Self:
        if (self.blocks is None) == (self.gib is None):
            given = "both are" if self.gib is not None else "neither is"
            raise ValueError(f"exactly one of --blocks and --gib must be set; {given}")
        return self


class UnloadSettings(SchedulerClientSettings):
    """Free a worker's device: drop weights, KV and adapters, and keep the process.

    The worker's requests continue on other workers of the model. If the model has no other workers,
    the requests wait, and keep the tokens that they have. `quire load` loads the model again, or
    another one.
    """

    worker: CliPositionalArg[str] = ""
    """The worker's address, as `quire top` shows it; empty: all workers of the scheduler."""


class LoadSettings(SchedulerClientSettings):
    """Load the model of an unloaded worker, and show the progress.

    With --model, the worker loads a new model instead. As soon as no worker serves the old model,
    the service switches to the new model, and requests that still wait for the old model end with
    an error. In requests, the new model has the name of its directory.
    """

    worker: CliPositionalArg[str] = ""
    """The worker's address, as `quire top` shows it; empty: all workers of the scheduler."""
    model: Path | None = None
    """Hugging Face directory, with the same absolute path on workers and routers; default: the
    worker's previous model."""


class LoraSettings(SchedulerClientSettings):
    """List the LoRA adapters of a running service, load one, or unload one.

    `quire lora load NAME=DIR` loads an adapter at every worker. DIR is a directory in PEFT's format
    on the workers' machines. Once the adapter is loaded, requests for the model NAME use it. After
    `quire lora unload NAME`, the service immediately refuses new requests for the adapter; the
    command returns when the adapter's live requests have ended.
    """

    action: CliPositionalArg[Literal["list", "load", "unload"]] = "list"
    """What to do: list, load or unload."""
    adapter: CliPositionalArg[str] = ""
    """For load: NAME=DIR; for unload: NAME."""

    @model_validator(mode="after")
    def _names_an_adapter(self) -> Self:
        name, _, directory = self.adapter.partition("=")
        match self.action:
            case "load" if not name or not directory:
                raise ValueError(f"load: needs NAME=DIR, not {self.adapter!r}")
            case "unload" if not name or directory:
                raise ValueError(f"unload: needs NAME, not {self.adapter!r}")
            case "list" if self.adapter:
                raise ValueError(f"list: takes no adapter, but {self.adapter!r} is given")
        return self


class MigrateSettings(SchedulerClientSettings):
    """Move a live request with its KV to another worker; the output does not change."""

    request_id: CliPositionalArg[str]
    """The request's id, as `quire kv` shows it."""
    to: str
    """The address of the new worker, as `quire kv` shows it."""


class DrainSettings(RouterClientSettings):
    """Drain and end one process: a router, a scheduler or a worker, on any machine.

    A draining router ends resumable streams, which clients resume at other routers. The sequences
    of a draining worker move to other workers. The exit code is 0 if the process has drained.
    """

    target: CliPositionalArg[str]
    """The gRPC address of the process: host:port, or unix:/path."""
    worker: str = ""
    """If the process is a scheduler: drain only its worker with this address."""


class _CommandSettings(BaseSettings):
    model_config = SettingsConfigDict(
        frozen=True,
        env_prefix=ENV_PREFIX,
        env_prefix_target="all",
        env_ignore_empty=True,
        use_attribute_docstrings=True,
    )


class ProbeSettings(_CommandSettings):
    """Check whether a process is ready, for a container's health check.

    The exit code is 0 if the process is ready.
    The command reads the process's address from the environment variables that configure the
    process.
    """

    host: str = "127.0.0.1"
    """The address on which the process listens."""
    http_port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """HTTP port of the process; default: a router's port."""
    tls_cert: Path | None = None
    """The certificate file of the process. If this flag is set, the command connects with TLS; it
    does not read the file."""


class QuantizeSettings(_CommandSettings):
    """Write a model as a GPTQ checkpoint of 4- or 8-bit integers, for `quire up --model`.

    With --calibrate, GPTQ fits the integers to the activations that the model computes for a text.
    The command runs on the CPU, in float32. It needs 4 bytes of memory per weight, and takes
    minutes for 135 million weights.
    """

    model: CliPositionalArg[str]
    """A directory of safetensors, or ORG/NAME on the Hugging Face hub."""
    out: CliPositionalArg[Path]
    """The directory to write; it must not exist."""
    calibrate: Path | None = None
    """UTF-8 file with text of the kind that the model will get. Unset: each weight is rounded to
    the nearest integer, which loses more quality."""
    bits: Literal["4", "8"] = "4"
    """Number of bits per weight."""
    group_size: Literal["32", "64", "128"] = "32"
    """Number of input features that share a scale. A smaller group loses less quality, but needs
    more memory."""
    num_samples: PositiveInt = 128
    """Maximum number of samples to take from the text of --calibrate; they are spread evenly."""
    sample_length: PositiveInt = 512
    """Tokens per sample."""
    cache_dir: Path = DEFAULT_CACHE_DIR
    """Directory for downloaded models."""


class ReplaySettings(_CommandSettings):
    """Replay a recording of a scheduler (`--record`).

    Shows totals and, for each preemption, its step, sequence, reason and cost. Exits with 1 if a
    replayed plan differs from the recorded one. To simulate another policy, use
    `bench/policy_study.py`.
    """

    file: CliPositionalArg[Path]
    """The recording of one worker."""
    step: PositiveInt | None = None
    """Show the full plan of this step, and nothing else."""


class DownSettings(_CommandSettings):
    """Stop a service that `quire up` started: let live requests finish, then end its processes."""

    http_port: ServicePort | None = None
    """Choose the service on this machine by its router's HTTP port; default: the only service."""
    all: bool = False
    """Stop all services."""


class LogsSettings(_CommandSettings):
    """Show the logs of a service's processes, in order of time.

    If no service is up, shows the logs of the service that ended last. The logs of the five
    services that ended last are kept.
    """

    process: CliPositionalArg[str] = ""
    """One process, by its name in `quire status`, or `up` for the supervisor; default: all
    processes, without the supervisor."""
    request: str = ""
    """Show only lines about the request with this id. `quire up --log-level debug` logs every step
    of a request."""
    follow: bool = False
    """Keep printing new lines, until Ctrl-C."""
    http_port: ServicePort | None = None
    """Choose the service on this machine by its router's HTTP port; default: the only service."""


class RestartSettings(_CommandSettings):
    """Restart the processes of a service that `quire up` started, one after another.

    Each process drains and ends. When the process that replaces it is ready, the command goes on to
    the next process. Streams pause while a worker or the scheduler restarts. While the router
    restarts, calls are refused, and clients retry.
    """

    names: CliPositionalArg[tuple[str, ...]] = ()
    """Names of processes in `quire status`; default: all."""
    http_port: ServicePort | None = None
    """Choose the service on this machine by its router's HTTP port; default: the only service."""
