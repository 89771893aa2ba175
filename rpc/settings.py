"""Settings of a process, from flags, environment variables and defaults, with readable errors."""

import argparse
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Self, TypeVar

from pydantic import (
    BeforeValidator,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from rpc.security.tls import ClientTls, ServerTls, check_authorities, check_certificate
from rpc.transport import (
    DEFAULT_MAX_CONCURRENT_STREAMS,
    DEFAULT_MAX_MESSAGE_MB,
    DEFAULT_MAX_METADATA_KB,
)

ENV_PREFIX = "QUIRE_"

Port = Annotated[int, Field(ge=0, le=65535)]
"""A TCP port; 0 picks a free one."""

PositiveInt = Annotated[int, Field(ge=1)]

ModelName = Annotated[
    str, BeforeValidator(lambda value: os.fspath(value) if isinstance(value, Path) else value)
]
"""A name or path of a model, of any kind that `model_files.locate.find_model` takes."""

_MAX_UDS_PATH_BYTES = 107
"""Maximum length of a Unix socket's path, set by the kernel."""


def split_at_commas(value: object) -> object:
    """Return the values of a flag as a tuple.

    A flag's `value` is a string, or several strings if the flag is repeated. In a string, commas
    separate values.
    """
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list | tuple):
        return tuple(part for item in value for part in str(item).split(",") if part)
    return value


class LinkSettings(BaseSettings):
    """Settings for calls to other processes."""

    model_config = SettingsConfigDict(
        frozen=True,
        env_prefix=ENV_PREFIX,
        env_prefix_target="all",  # the prefix also applies to fields with an alias
        env_ignore_empty=True,
        use_attribute_docstrings=True,
    )

    tls_ca: Path | None = None
    """PEM file with the authorities to trust when calling other processes. Turns on TLS for calls,
    except on Unix sockets. Unset: calls are not encrypted."""
    tls_cert: Path | None = None
    """PEM file with this process's certificate, followed by intermediate certificates."""
    tls_key: Path | None = None
    """PEM file with the private key of --tls-cert, not encrypted."""
    tls_server_name: str = ""
    """Name to expect in the certificates of called processes; empty: the host of the address. To
    call processes by IP address, set this to a name that all their certificates have."""

    @property
    def client_tls(self) -> ClientTls | None:
        """TLS for calls to other processes; None: no TLS."""
        if self.tls_ca is None:
            return None
        return ClientTls(self.tls_ca, self.tls_cert, self.tls_key, self.tls_server_name)

    @model_validator(mode="after")
    def _tls_files_are_right(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key need each other")
        if self.tls_server_name and self.tls_ca is None:
            raise ValueError("--tls-server-name needs --tls-ca")
        if self.tls_cert is not None and self.tls_key is not None:
            check_certificate(self.tls_cert, self.tls_key)
        if self.tls_ca is not None:
            check_authorities(self.tls_ca)
        return self


class ProcessSettings(LinkSettings):
    """Settings of every process: addresses, TLS, limits, logs and traces."""

    # Each service extends this class. A field is a flag (`--grpc-port`) and an environment variable
    # (`QUIRE_GRPC_PORT`). Its docstring is the --help text; the class's docstring is the text above
    # the flags. A subclass that changes a port's default must repeat the type `Port`.

    tls_client_ca: Path | None = None
    """PEM file with authorities. Callers over gRPC and HTTP need a certificate that one of these
    authorities has signed, except for /health and /ready. Needs --tls-cert, which turns on TLS for
    the process's own ports. Unset: callers need no certificate."""
    tls_client_names: str = ""
    """Names of accepted callers, separated by commas. A caller's certificate must have one of these
    names as an alternative name (DNS name, URI or address); the common name counts only if there
    are no alternative names. Needs --tls-client-ca. Empty: accept every certificate from an
    authority in --tls-client-ca."""
    host: str = "127.0.0.1"
    """Address to listen on, for gRPC and HTTP."""
    grpc_port: Port = 0
    """Port for gRPC; 0 picks a free one."""
    uds: Path | None = None
    """Path of a Unix socket for gRPC, instead of host and port."""
    operator_uds: Path | None = None
    """Path of an additional Unix socket for gRPC, for operators on this machine; its file
    permissions protect it. Unset: none."""
    http_port: Port = 0
    """Port for HTTP; 0 picks a free one."""
    max_message_mb: Annotated[int, Field(ge=1, le=2047)] = DEFAULT_MAX_MESSAGE_MB
    """Maximum size of a gRPC message in either direction, in MiB."""
    max_metadata_kb: Annotated[int, Field(ge=1, le=1024)] = DEFAULT_MAX_METADATA_KB
    """Maximum size of the metadata of a gRPC call, in KiB."""
    max_concurrent_streams: Annotated[int, Field(ge=1, le=2**31 - 1)] = (
        DEFAULT_MAX_CONCURRENT_STREAMS
    )
    """Maximum number of concurrent gRPC calls on one connection; further calls wait at the client.
    """
    reflection: bool = True
    """Whether gRPC reflection lists the process's services and messages."""
    drain_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0
    """How long live requests may take to finish after SIGTERM, in seconds."""
    local_drain: bool = False
    """Whether to allow operators' calls (`quire drain`, LoRA adapters) over TCP from this machine,
    and not only on a Unix socket. Has an effect only if callers need neither key nor certificate.
    Beware of a proxy on this machine, which may forward other users' calls."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest severity of log lines to write."""
    log_format: Literal["auto", "json", "console"] = "auto"
    """Format of log lines; auto is console on a terminal and json elsewhere."""
    otlp_traces_endpoint: str = ""
    """Endpoint for traces (OTLP over gRPC), such as http://localhost:4317; empty: no traces."""
    loop_stall_s: Annotated[float, Field(ge=0, le=60)] = 0.25
    """Report when the event loop does not run for this many seconds, with the stack that blocks it
    (docs/observability.md); 0: do not watch it."""
    timeline_dir: Path | None = None
    """Directory where this process writes its timeline for Perfetto when it ends; unset: no
    timeline. `quire bench --profile` makes a timeline of all processes."""

    @field_validator("uds", "operator_uds")
    @classmethod
    def _uds_fits(cls, path: Path | None) -> Path | None:
        if path is not None and len(os.fsencode(path)) > _MAX_UDS_PATH_BYTES:
            raise ValueError(
                f"has {len(os.fsencode(path))} bytes; a socket's path must have at most"
                f" {_MAX_UDS_PATH_BYTES}"
            )
        return path

    @property
    def server_tls(self) -> ServerTls | None:
        """TLS of the process's ports; None: no TLS."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return ServerTls(self.tls_cert, self.tls_key, self.tls_client_ca)

    @property
    def client_names(self) -> frozenset[str]:
        """`tls_client_names` as a set."""
        return frozenset(filter(None, map(str.strip, self.tls_client_names.split(","))))

    @model_validator(mode="after")
    def _client_ca_is_right(self) -> Self:
        if self.tls_client_ca is not None:
            if self.tls_cert is None:
                raise ValueError("--tls-client-ca needs --tls-cert")
            check_authorities(self.tls_client_ca)
        elif self.tls_client_names:
            raise ValueError("--tls-client-names needs --tls-client-ca")
        return self


S = TypeVar("S", bound=BaseSettings)


def parse_settings(cls: type[S], prog: str, argv: Sequence[str] | None = None) -> S:
    """Parse flags and environment variables; `argv` defaults to the process's arguments.

    For each invalid value, prints a line on standard error with the flag or variable, the value and
    the limit; then exits with code 2. --help exits with code 0.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        source: CliSettingsSource[Any] = CliSettingsSource(
            cls,
            cli_prog_name=prog,
            cli_kebab_case=True,
            cli_implicit_flags=True,
            cli_avoid_json=True,
            cli_hide_none_type=True,
            cli_show_env_vars=True,
            formatter_class=_HelpFormatter,
        )
        return CliApp.run(cls, cli_args=arguments, cli_settings_source=source)
    except ValidationError as error:
        _fail(
            prog,
            [
                _describe(e["loc"], _shown(cls, e["loc"], e.get("input")), e["msg"], arguments)
                for e in error.errors()
            ],
        )
    except SettingsError as error:
        _fail(prog, [str(error)])


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Formats help texts: removes indentation, Python's notation of types, and empty defaults.

    A line never ends within a flag's name.
    """

    def add_text(self, text: str | None) -> None:
        super().add_text(None if text is None else inspect.cleandoc(text))

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[argparse._MutuallyExclusiveGroup],
        prefix: str | None = None,
    ) -> None:
        for action in actions:
            _tidy(action)
        super().add_usage(usage, actions, groups, prefix)

    def add_argument(self, action: argparse.Action) -> None:
        _tidy(action)
        super().add_argument(action)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def _tidy(action: argparse.Action) -> None:
    if isinstance(action.metavar, str):
        name = re.sub(r"tuple\[(\w+),\.\.\.\]", r"\1", action.metavar)
        action.metavar = "str" if name == SecretStr.__name__ else name
    if action.help is not None:  # docstrings describe computed and empty defaults
        action.help = re.sub(r" \(default factory: [^)]*\)", "", action.help)
        action.help = re.sub(r" \(default: (None|\(\))?\)", "", action.help)


def _shown(cls: type[BaseSettings], loc: tuple[int | str, ...], value: object) -> object:
    """Return the value to show in errors; asterisks for a secret."""
    field = cls.model_fields.get(str(loc[0])) if loc else None
    is_secret = field is not None and SecretStr.__name__ in repr(field.annotation)
    return "***" if is_secret else value


def _describe(
    loc: tuple[int | str, ...], value: object, problem: str, arguments: Sequence[str]
) -> str:
    problem = problem.removeprefix("Value error, ")
    if not loc:  # a validator of several fields names them in its message
        return problem
    name = str(loc[0])
    flag = "--" + name.replace("_", "-")
    given = any(argument == flag or argument.startswith(flag + "=") for argument in arguments)
    variable = ENV_PREFIX + name.upper()
    origin = flag if given or variable not in os.environ else variable
    if problem == "Field required":
        return f"{origin}: is required"
    return f"{origin}: {value}: {problem}"


def _fail(prog: str, problems: Sequence[str]) -> NoReturn:
    for problem in problems:
        sys.stderr.write(f"{prog}: {problem}\n")
    raise SystemExit(2)
