"""What each subcommand but `up` is told: flags, environment variables, defaults."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, CliPositionalArg, NoDecode, SettingsConfigDict

from rpc.settings import ENV_PREFIX, LinkSettings, PositiveInt, split_at_commas


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
    max_tokens: PositiveInt | None = None
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
    n: PositiveInt = 1
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
    concurrency: PositiveInt = 8
    """Streams at once."""
    num_prompts: PositiveInt = 64
    """Requests in all."""
    input_len: PositiveInt = 128
    """Tokens of a prompt."""
    output_len: PositiveInt = 64
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


class SchedulerClientSettings(LinkSettings):
    """What the commands that talk to a scheduler share."""

    scheduler: str = ""
    """The scheduler's gRPC: host:port, or unix:/path; empty: that of the service that runs on this
    machine, if it is the only one."""


class ResizeSettings(SchedulerClientSettings):
    """Give a worker's KV pool another size while it works, such as to let another model have room.

    Of the blocks that go, the contents are moved or preempted first. Give --blocks or --gib.
    """

    worker: str = ""
    """The worker's target, as `quire kv` shows it; empty: the scheduler's only one."""
    blocks: Annotated[int, Field(ge=1)] | None = None
    """How many device blocks it is to have."""
    gib: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """How much memory its device blocks are to take, in GiB."""

    @model_validator(mode="after")
    def _has_one_size(self) -> Self:
        if (self.blocks is None) == (self.gib is None):
            given = "both are" if self.gib is not None else "neither is"
            raise ValueError(f"one of --blocks and --gib must be given; {given}")
        return self


class UnloadSettings(SchedulerClientSettings):
    """Have a worker give its device back: weights, KV and adapters go, and the process stays.

    What runs there goes on at other workers of the model, or waits with the tokens that it has.
    `quire load` brings the model back, or another one in its place.
    """

    worker: CliPositionalArg[str] = ""
    """The worker's target, as `quire top` shows it; empty: all of the scheduler's."""


class LoadSettings(SchedulerClientSettings):
    """Have a worker that was unloaded load its model, and show how far it is.

    With --model it is another one, with which the worker is used if no other worker serves the one
    before. Requests call it by its directory's name. What still waits for the one before then ends.
    """

    worker: CliPositionalArg[str] = ""
    """The worker's target, as `quire top` shows it; empty: all of the scheduler's."""
    model: Path | None = None
    """Hugging Face directory, of the same absolute path at workers and routers; default: the one
    that was there."""


class LoraSettings(SchedulerClientSettings):
    """List the LoRA adapters of a service that works; load one more, or unload one.

    `quire lora load NAME=DIR` has every worker read the adapter in DIR, a directory on the workers'
    machines in the format of PEFT. From then on requests whose model is NAME are computed with it.
    `quire lora unload NAME` refuses new requests for it at once, and returns when those that have
    it have ended.
    """

    action: CliPositionalArg[Literal["list", "load", "unload"]] = "list"
    """What is to be done: list, load or unload."""
    adapter: CliPositionalArg[str] = ""
    """To load: NAME=DIR; to unload: NAME."""

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
    """Move a live request with its KV to another worker; its output stays what it would be."""

    request_id: CliPositionalArg[str]
    """The request's id, as `quire kv` shows it."""
    to: str
    """The worker's target, as `quire kv` shows it."""


class DrainSettings(RouterClientSettings):
    """Have one process drain and end: a router, a scheduler or a worker, of whatever machine.

    A router hands over what its clients can resume, a worker gives its sequences to others first.
    Exits with 0 when it has drained.
    """

    target: CliPositionalArg[str]
    """The process's gRPC: host:port, or unix:/path."""
    worker: str = ""
    """At a scheduler: the worker that it has drain in its place, by the target that it knows."""


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
    step: PositiveInt | None = None
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
