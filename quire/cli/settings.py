"""The settings of each subcommand but `up`: flags, environment variables, defaults."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, CliPositionalArg, SettingsConfigDict

from rpc.settings import ENV_PREFIX, LinkSettings, PositiveInt

ServicePort = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class RouterClientSettings(LinkSettings):
    """What every command that calls a router needs."""

    api_key: SecretStr = SecretStr("")
    """The API key, if the router requires one. Prefer the environment variable, since other users
    can see a command line."""


class RouterTargetSettings(RouterClientSettings):
    """And which router it is."""

    target: str = ""
    """The router's gRPC: host:port, or unix:/path; empty: that of the service on this machine, else
    127.0.0.1:50051."""
    http_port: ServicePort | None = None
    """Which service of this machine, by its router's HTTP port; default: the only one."""


class ClientSettings(RouterTargetSettings):
    """The flags of both `generate` and `chat`."""

    served_model_name: str = ""
    """The model's name; empty: the only one that is served."""
    max_tokens: PositiveInt | None = None
    """Most tokens to generate; default: as many as fit in the context."""
    temperature: float | None = None
    """Randomness; 0 always takes the likeliest token; default: 1."""
    top_p: float | None = None
    """Sample from the likeliest tokens with this total probability; default: from all."""
    top_k: int = 0
    """Sample from this many of the likeliest tokens; 0: from all."""
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    """Seed; the same seed gives the same output."""
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """The request's deadline, in seconds; default: none."""


class GenerateSettings(ClientSettings):
    """Continue a prompt, streaming."""

    prompt: CliPositionalArg[str]
    """The text to continue; - reads standard input."""
    n: PositiveInt = 1
    """How many outputs; several are shown when complete, one after another."""
    beam_width: Annotated[int, Field(ge=2, le=10)] | None = None
    """Beam search with this many beams; default: sample instead."""
    length_penalty: Annotated[float, Field(ge=-5, le=5)] = 1.0
    """With --beam-width: above 0 favours longer outputs."""
    early_stopping: Literal["false", "true", "never"] = "false"
    """With --beam-width: when the search stops, as in transformers."""
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
    """Chat with the model, streaming; /new forgets the conversation, /quit or Ctrl-D ends it."""

    system: str = ""
    """The system message at the start of the conversation."""


class BenchSettings(RouterClientSettings):
    """Measure a service with streams of random tokens.

    --concurrency streams run at a time; the next starts when one ends. Without --target, starts a
    service for the measurement, and stops it afterwards.
    """

    target: str = ""
    """The gRPC of a running service: host:port, or unix:/path; empty: start one."""
    model: Path | None = None
    """The model of the service to start; default: the small model that Quire ships."""
    concurrency: PositiveInt = 8
    """Concurrent streams."""
    num_prompts: PositiveInt = 64
    """Requests in all."""
    input_len: PositiveInt = 128
    """Tokens per prompt."""
    output_len: PositiveInt = 64
    """Tokens per output."""
    profile: Path | None = None
    """Write a timeline of scheduler, network and worker to this file, for ui.perfetto.dev, and show
    where the time of a step goes. Not with --target."""

    @model_validator(mode="after")
    def _profile_needs_its_own_service(self) -> Self:
        if self.target and (self.profile or self.model):
            flag = "--profile" if self.profile else "--model"
            raise ValueError(f"{flag}: needs a service that is started for it; leave out --target")
        return self


class StatusSettings(RouterTargetSettings):
    """Show the service's processes, their health and their load. Exits with 0 if all are ready."""

    target: str = ""
    """A router elsewhere: host:port, or unix:/path; empty: the services on this machine."""
    http_port: ServicePort | None = None
    """Which service of this machine, by its router's HTTP port; default: all."""


class KvSettings(RouterTargetSettings):
    """Show who holds which KV blocks: a map of each worker's tiers, and its live sequences."""

    worker: str = ""
    """Only this worker, by its target; empty: all."""
    first_block: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Show blocks from this one on."""
    first_seq_id: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Show sequences from this one on."""
    max_sequences: Annotated[int, Field(ge=0, le=1024)] = 256
    """Most sequences per worker."""
    json_: Annotated[bool, Field(alias="json")] = False
    """Write JSON, with block tables and reference counts."""


class TopSettings(RouterTargetSettings):
    """Watch a service: queues, sequences, KV tiers, and what each worker does. q quits.

    Latencies and refusals come from the router's HTTP, so they are shown only for services on this
    machine.
    """

    interval_s: Annotated[float, Field(gt=0, le=3600)] = 1.0
    """Seconds between two frames; rates are averages over that time."""
    once: bool = False
    """Print one frame, after one interval, and end."""
    max_sequences: Annotated[int, Field(ge=0, le=1024)] = 256
    """Most sequences per worker to ask for; as many are shown as fit on the terminal."""


class _ChosenRequests(RouterTargetSettings):
    """The flags of both `requests` and `cancel`."""

    tenant: str | None = None
    """Only requests of this tenant."""
    older_than_s: Seconds | None = None
    """Only requests that came at least so many seconds ago."""


class RequestsSettings(_ChosenRequests):
    """List the live requests of a router: who asked, how long ago, how far they are.

    For operators. A router knows its own requests; what their sequences hold, `quire kv` shows.
    """

    json_: Annotated[bool, Field(alias="json")] = False
    """Write JSON, a line for each request."""


class CancelSettings(_ChosenRequests):
    """End live requests of a router: by id, by tenant, by age, or all.

    For operators. The clients get an error that says so, and should not send the request again.
    """

    request_ids: CliPositionalArg[tuple[str, ...]] = ()
    """Ids, as `quire requests` shows them."""
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
    """The scheduler's gRPC: host:port, or unix:/path; empty: that of the service on this
    machine."""
    http_port: ServicePort | None = None
    """Which service of this machine, by its router's HTTP port; default: the only one."""


class DefragmentSettings(SchedulerClientSettings):
    """Defragment the KV pool of each worker while it keeps working: move held blocks together."""

    scheduler: str = ""
    """The scheduler's gRPC: host:port, or unix:/path; empty: that of the service on this machine,
    else 127.0.0.1:50052."""


class ResizeSettings(SchedulerClientSettings):
    """Resize a worker's KV pool while it works, for example to make room for another model.

    What is in removed blocks is moved first, or its sequences are preempted. Give --blocks or
    --gib.
    """

    worker: str = ""
    """The worker, by the target that `quire kv` shows; empty: the scheduler's only one."""
    blocks: Annotated[int, Field(ge=1)] | None = None
    """The new number of device blocks."""
    gib: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """The new memory of the device blocks, in GiB."""

    @model_validator(mode="after")
    def _has_one_size(self) -> Self:
        if (self.blocks is None) == (self.gib is None):
            given = "both are" if self.gib is not None else "neither is"
            raise ValueError(f"one of --blocks and --gib must be given; {given}")
        return self


class UnloadSettings(SchedulerClientSettings):
    """Free a worker's device: drop weights, KV and adapters, and keep the process.

    Its requests continue on other workers of the model, or wait with the tokens that they have.
    `quire load` loads the model again, or another one.
    """

    worker: CliPositionalArg[str] = ""
    """The worker, by the target that `quire top` shows; empty: all of the scheduler's."""


class LoadSettings(SchedulerClientSettings):
    """Load the model of a worker that was unloaded, and show the progress.

    --model loads another one; the worker then serves if no other worker serves the old one. Its
    name in requests is the directory's. Requests that still wait for the old model end.
    """

    worker: CliPositionalArg[str] = ""
    """The worker, by the target that `quire top` shows; empty: all of the scheduler's."""
    model: Path | None = None
    """Hugging Face directory, with the same absolute path on workers and routers; default: that of
    the model that the worker had."""


class LoraSettings(SchedulerClientSettings):
    """List the LoRA adapters of a running service, load one, or unload one.

    `quire lora load NAME=DIR` makes every worker load the adapter in DIR, a directory in PEFT's
    format on the workers' machines; then requests for the model NAME use it. `quire lora unload
    NAME` refuses new requests for it at once, and returns when the live ones have ended.
    """

    action: CliPositionalArg[Literal["list", "load", "unload"]] = "list"
    """list, load or unload."""
    adapter: CliPositionalArg[str] = ""
    """For load: NAME=DIR; for unload: NAME."""

    @model_validator(mode="after")
    def _names_an_adapter(self) -> Self:
        name, _, directory = self.adapter.partition("=")
        match self.action:
            case "load" if not name or not directory:
                raise ValueError(f"load: must be followed by NAME=DIR; {self.adapter!r} is not")
            case "unload" if not name or directory:
                raise ValueError(f"unload: must be followed by NAME; {self.adapter!r} is not")
            case "list" if self.adapter:
                raise ValueError(f"list: takes no adapter, and {self.adapter!r} is given")
        return self


class MigrateSettings(SchedulerClientSettings):
    """Move a live request with its KV to another worker; its output does not change."""

    request_id: CliPositionalArg[str]
    """The request's id, as `quire kv` shows it."""
    to: str
    """The worker's target, as `quire kv` shows it."""


class DrainSettings(RouterClientSettings):
    """Drain and end one process: a router, a scheduler or a worker, on any machine.

    A router hands over the streams that its clients can resume; a worker gives its sequences to
    other workers. Exits with 0 when the process has drained.
    """

    target: CliPositionalArg[str]
    """The process's gRPC: host:port, or unix:/path."""
    worker: str = ""
    """If the process is a scheduler: drain this worker of it instead, by the target it knows."""


class _CommandSettings(BaseSettings):
    model_config = SettingsConfigDict(
        frozen=True,
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        use_attribute_docstrings=True,
    )


class ProbeSettings(_CommandSettings):
    """Ask one process whether it is ready, for a container's health check. Exits with 0 if it is.

    Reads the same environment variables as the process does to know where it listens.
    """

    host: str = "127.0.0.1"
    """The address the process listens on."""
    http_port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """Its HTTP port; default: a router's."""
    tls_cert: Path | None = None
    """The process's certificate file. It is not read: if it is set, the process's HTTP uses TLS."""


class ReplaySettings(_CommandSettings):
    """Replay a recording of a scheduler (`--record`). Exits with 1 if a plan differs.

    Shows totals, and for each preemption when it was, which sequence, why, and what it cost. What
    another policy would have done, `bench/policy_study.py` simulates.
    """

    file: CliPositionalArg[Path]
    """The recording of one worker."""
    step: PositiveInt | None = None
    """Show the full plan of this step instead."""


class DownSettings(_CommandSettings):
    """Stop a service that `quire up` started: let live requests finish, then end its processes."""

    http_port: ServicePort | None = None
    """Which service of this machine, by its router's HTTP port; default: the only one."""
    all: bool = False
    """Stop all services."""


class LogsSettings(_CommandSettings):
    """Show what the processes of a service have logged, in order of time.

    Without a service that is up, the logs of the last one that was; five are kept.
    """

    process: CliPositionalArg[str] = ""
    """One process, by its name in `quire status`, or `up` for the supervisor; default: all."""
    request: str = ""
    """Only what concerns this request, by its id. What each process does with it is logged with
    `quire up --log-level debug`."""
    follow: bool = False
    """Go on as lines are added, until Ctrl-C."""
    http_port: ServicePort | None = None
    """Which service of this machine, by its router's HTTP port; default: the only one."""


class RestartSettings(_CommandSettings):
    """Restart the processes of a service that `quire up` started, one after another.

    Each drains, ends, and is ready again before the next one's turn. Streams pause while a worker
    or the scheduler restarts; while the router restarts, calls are refused, and clients retry.
    """

    names: CliPositionalArg[tuple[str, ...]] = ()
    """Names of processes, as `quire status` shows them; default: all."""
    http_port: ServicePort | None = None
    """Which service of this machine, by its router's HTTP port; default: the only one."""
