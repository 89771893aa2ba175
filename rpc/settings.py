"""Settings of a process: flags over environment over defaults, frozen, with errors for people."""

import argparse
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from rpc.transport import DEFAULT_MAX_MESSAGE_MB

ENV_PREFIX = "QUIRE_"

Port = Annotated[int, Field(ge=0, le=65535)]
"""A TCP port; 0 picks a free one."""

_MAX_UDS_PATH_BYTES = 107
"""What the kernel's socket address holds."""


class ProcessSettings(BaseSettings):
    """What every process is told."""

    # A service's own settings extend this class. Each field is a flag (`--grpc-port`) and an
    # environment variable (`QUIRE_GRPC_PORT`), and its docstring is what --help says of it; the
    # class's docstring heads the page. Who overrides a port's default writes `Port` again.

    model_config = SettingsConfigDict(
        frozen=True,
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        use_attribute_docstrings=True,
    )

    host: str = "127.0.0.1"
    """Address to listen on, for gRPC and HTTP."""
    grpc_port: Port = 0
    """Port of gRPC; 0 picks a free one."""
    uds: Path | None = None
    """Path of a Unix socket for gRPC, instead of host and port."""
    http_port: Port = 0
    """Port of HTTP; 0 picks a free one."""
    max_message_mb: Annotated[int, Field(ge=1, le=2047)] = DEFAULT_MAX_MESSAGE_MB
    """Largest gRPC message, sent or received, in MiB."""
    drain_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0
    """How long live requests may take to finish after SIGTERM, in seconds."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe log lines to write."""
    log_format: Literal["auto", "json", "console"] = "auto"
    """How log lines look; auto is console on a terminal and json elsewhere."""
    otlp_traces_endpoint: str = ""
    """Where spans go, by OTLP over gRPC, such as http://localhost:4317; empty: nowhere."""
    timeline_dir: Path | None = None
    """Directory for a file of what this process did when, written when it ends, to look at in
    Perfetto; unset: none is made. `quire bench --profile` makes one of all processes."""

    @field_validator("uds")
    @classmethod
    def _uds_fits(cls, path: Path | None) -> Path | None:
        if path is not None and len(os.fsencode(path)) > _MAX_UDS_PATH_BYTES:
            raise ValueError(
                f"has {len(os.fsencode(path))} bytes; a socket's path has at most"
                f" {_MAX_UDS_PATH_BYTES}"
            )
        return path


S = TypeVar("S", bound=BaseSettings)


def parse_settings(cls: type[S], prog: str, argv: Sequence[str] | None = None) -> S:
    """Parse `argv` (by default the process's) and the environment.

    What is wrong is written to standard error, a line for each, naming the flag or variable, the
    value and the limit, and the process exits with 2; --help exits with 0.
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
            prog, [_describe(e["loc"], e.get("input"), e["msg"], arguments) for e in error.errors()]
        )
    except SettingsError as error:
        _fail(prog, [str(error)])


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Speaks of values instead of Python's types and functions."""

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


def _tidy(action: argparse.Action) -> None:
    if isinstance(action.metavar, str):
        action.metavar = re.sub(r"tuple\[(\w+),\.\.\.\]", r"\1", action.metavar)
    if action.help is not None:  # a default that is computed is the docstring's to tell
        action.help = re.sub(r" \(default factory: [^)]*\)", "", action.help)


def _describe(
    loc: tuple[int | str, ...], value: object, problem: str, arguments: Sequence[str]
) -> str:
    problem = problem.removeprefix("Value error, ")
    if not loc:  # of several fields together: the validator names them
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
