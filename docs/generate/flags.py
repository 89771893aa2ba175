"""Generates the page of flags, from the settings of every process and command."""

import importlib
import inspect
import re

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from pydantic_settings import BaseSettings

from gpu_worker.settings import WorkerSettings
from quire.cli.__main__ import COMMANDS
from router.settings import RouterSettings
from rpc.settings import ENV_PREFIX, ProcessSettings
from scheduler_svc.settings import SchedulerSettings
from sim_worker.settings import SimWorkerSettings

PROCESSES: dict[str, type[BaseSettings]] = {
    "quire-router": RouterSettings,
    "quire-scheduler": SchedulerSettings,
    "quire-worker": WorkerSettings,
    "quire-sim-worker": SimWorkerSettings,
}
_HEAD = """# Flags

Every flag of a process is an environment variable, too: `--grpc-port` is `QUIRE_GRPC_PORT`. A flag
wins over its variable, and that over the default. `--help` says the same.
"""


def commands() -> dict[str, type[BaseSettings]]:
    """Return the settings that each subcommand parses, by the words of the command."""
    found = {}
    for name in COMMANDS.values():
        module = importlib.import_module(name)
        parsed = re.search(r'parse_settings\((\w+), "(quire [\w-]+)"', inspect.getsource(module))
        if parsed is None:
            raise ValueError(f"{module.__name__} does not parse its settings")
        found[parsed[2]] = getattr(module, parsed[1])
    return found


def page() -> str:
    """Return the page, in Markdown."""
    parts = [_HEAD, "## Every process\n", _table(ProcessSettings)]
    for name, cls in (PROCESSES | commands()).items():
        shared = ProcessSettings.model_fields if issubclass(cls, ProcessSettings) else {}
        parts += [f"## {name}\n", f"{inspect.cleandoc(cls.__doc__ or '')}\n", _table(cls, shared)]
    return "\n".join(parts)


def _table(cls: type[BaseSettings], shared: dict[str, FieldInfo] | None = None) -> str:
    rows = [
        f"| {flag} | {_default(field)} | {_cell(field.description or '')} |"
        for name, field in cls.model_fields.items()
        if not _is_same(field, (shared or {}).get(name))
        for flag in [_flag(cls, name, field)]
    ]
    return "\n".join(["| flag | default | |", "|---|---|---|", *rows, ""])


def _is_same(field: FieldInfo, shared: FieldInfo | None) -> bool:
    return shared is not None and (field.default, field.description) == (
        shared.default,
        shared.description,
    )


def _flag(cls: type[BaseSettings], name: str, field: FieldInfo) -> str:
    if any("Positional" in type(entry).__name__ for entry in field.metadata):
        return f"`{name.upper()}`"
    flag = f"`--{name.replace('_', '-')}`"
    has_variable = cls.model_config.get("env_prefix") == ENV_PREFIX
    return flag if has_variable else f"{flag} (no variable)"


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "computed"
    if field.default is PydanticUndefined:
        return "required"
    match field.default:
        case None | "":
            return ""
        case True:
            return "on"
        case False:
            return "off"
        case tuple() as values:
            return f"`{','.join(map(str, values))}`" if values else ""
        case value:
            return f"`{value}`"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")
