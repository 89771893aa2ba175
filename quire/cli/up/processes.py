"""The command line and environment of each process of one service."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from quire.cli.up import ports
from quire.cli.up.child import ProcessSpec
from quire.cli.up.settings import (
    ANY_WORKER_FLAGS,
    COMMON_FLAGS,
    DEVICE_WORKER_FLAGS,
    ROUTER_FLAGS,
    SCHEDULER_FLAGS,
    UpSettings,
)
from rpc.settings import ENV_PREFIX

EXIT_STALE_EPOCH: Final = 3
"""The exit code of a scheduler whose workers another scheduler took over. The number must equal
`EXIT_STALE_EPOCH` in `scheduler_svc/__main__.py`."""
GPU_MEMORY_UTILIZATION: Final = 0.9
"""The worker's default for --gpu-memory-utilization."""


@dataclass(frozen=True, slots=True)
class ServicePorts:
    """The ports of a service; each was free when it was chosen."""

    http_port: int
    grpc_port: int
    """The router's gRPC port; 0: the router listens on a Unix socket instead."""
    router_http_ports: tuple[int, ...]
    """The HTTP port of each router; a single router has `http_port`."""
    scheduler_http_ports: tuple[tuple[int, ...], ...]
    """For each model, the ports of the scheduler and of the standby, if there is a standby."""
    worker_http_ports: tuple[tuple[int, ...], ...]
    """For each model, the ports of its workers."""


class Processes:
    """The processes of a service, which talk through Unix sockets in its directory.

    Each model has a cell with its own workers and scheduler; `cell` is the index of a cell.
    """

    def __init__(
        self,
        settings: UpSettings,
        models: Mapping[str, str],
        chosen: ServicePorts,
        directory: Path,
        environment: Mapping[str, str],
    ) -> None:
        self._settings = settings
        self._models = models
        self._names = [*models]
        self._ports = chosen
        self._directory = directory
        self._environment = _without_our_own(environment)
        self._num_workers = settings.simulate or settings.num_workers
        """The number of workers of each model."""
        self._router_names = ["router"]
        if settings.routers > 1:
            self._router_names = [f"router-{i}" for i in range(settings.routers)]
        self.operator_sockets = [
            Path(directory, f"{name}.sock").absolute() for name in self._router_names
        ]
        """For each router, the socket that only operators may use."""
        if settings.operator_uds is not None:
            self.operator_sockets = [settings.operator_uds.absolute()]

    def workers(self) -> list[ProcessSpec]:
        cells = range(len(self._names))
        if self._settings.simulate is not None:
            return [self._simulated(cell) for cell in cells]
        return [self._worker(cell, i) for cell in cells for i in range(self._num_workers)]

    def schedulers(self) -> list[ProcessSpec]:
        """Return each model's scheduler and, if there is one, its standby."""
        return [
            self._scheduler(cell, i)
            for cell, of_cell in enumerate(self._ports.scheduler_http_ports)
            for i in range(len(of_cell))
        ]

    def routers(self) -> list[ProcessSpec]:
        return [self._router(i) for i in range(len(self._router_names))]

    def scheduler_targets(self, cell: int) -> str:
        """Return the targets of a model's scheduler and its standby, with a comma between them."""
        numbers = range(len(self._ports.scheduler_http_ports[cell]))
        return ",".join(f"unix:{self._scheduler_socket(cell, i)}" for i in numbers)

    def _worker(self, cell: int, i: int) -> ProcessSpec:
        settings = self._settings
        name = self._process_name("worker", cell, f"-{i}")
        return self._spec(
            name,
            "gpu_worker",
            self._ports.worker_http_ports[cell][i],
            *self._model_flags(cell),
            *("--uds", self._worker_socket(cell, i), "--worker-id", name),
            *("--device", settings.device),
            *_flags(settings, ANY_WORKER_FLAGS + DEVICE_WORKER_FLAGS),
            *_share_of_device(settings),
            *_num_threads(settings),
            *_role(settings, i),
            group=2,
            **_devices(settings, i, self._environment),
        )

    def _simulated(self, cell: int) -> ProcessSpec:
        several = f"{self._directory}/worker{f'-{cell}' if cell else ''}.sock"
        return self._spec(
            self._process_name("sim-workers", cell),
            "sim_worker",
            self._ports.worker_http_ports[cell][0],
            *self._model_flags(cell),
            *("--uds", several if self._num_workers > 1 else self._worker_socket(cell, 0)),
            *("--count", str(self._num_workers)),
            *("--worker-id", self._process_name("sim", cell)),
            *_flags(self._settings, ANY_WORKER_FLAGS),
            group=2,
        )

    def _scheduler(self, cell: int, i: int) -> ProcessSpec:
        settings = self._settings
        sockets = (self._worker_socket(cell, i) for i in range(self._num_workers))
        name = self._process_name("scheduler", cell, f"-{i}" if settings.standby else "")
        data_name = f"{self._names[cell]}-{self._ports.http_port}"
        spec = self._spec(
            name,
            "scheduler_svc",
            self._ports.scheduler_http_ports[cell][i],
            *("--uds", self._scheduler_socket(cell, i)),
            *("--workers", ",".join(f"unix:{socket}" for socket in sockets)),
            *_flags(settings, SCHEDULER_FLAGS),
            *_state_file(settings, data_name, self._environment),
            # Both schedulers get --standby, so that whichever restarts becomes the standby.
            *(("--standby", "--standby-http", "--scheduler-id", name) if settings.standby else ()),
            group=1,
        )
        return replace(spec, harmless_exit_code=EXIT_STALE_EPOCH)

    def _router(self, i: int) -> ProcessSpec:
        settings = self._settings
        data_name = f"{self._names[0]}-{self._ports.http_port}"
        return self._spec(
            self._router_names[i],
            "router",
            self._ports.router_http_ports[i],
            *self._model_flags(0),
            *("--scheduler", self.scheduler_targets(0)),
            *self._listening_flags(),
            *self._further_cells(),
            *("--operator-uds", str(self.operator_sockets[i])),
            *_flags(settings, ROUTER_FLAGS),
            *_audit_log(settings, i),
            *(() if settings.reflection else ("--no-reflection",)),
            *(() if settings.ui else ("--no-ui",)),
            # The other processes do not need this flag, because they listen on Unix sockets.
            *(("--local-drain",) if settings.local_drain else ()),
            group=0,
            **_secrets(settings),
            **_turn_store(settings, data_name, self._environment),
        )

    def _spec(
        self, name: str, module: str, http_port: int, *flags: str, group: int, **more: str
    ) -> ProcessSpec:
        # -P: a file http.py in the working directory must not hide Python's own.
        start = (sys.executable, "-P", "-m", module, "--http-port", str(http_port))
        return ProcessSpec(
            name=name,
            argv=(*start, *_flags(self._settings, COMMON_FLAGS), *flags),
            http_address=ports.join(ports.reachable(self._settings.host), http_port),
            stop_group=group,
            environment={**self._environment, **more},
        )

    def _process_name(self, kind: str, cell: int, suffix: str = "") -> str:
        """Return a process's name, which contains the model's name if there are several models."""
        names = self._names
        return f"{kind}{f'-{folder_of(names[cell])}' if len(names) > 1 else ''}{suffix}"

    # Sockets have numbers instead of names, because a socket's path must be short.
    def _worker_socket(self, cell: int, i: int) -> str:
        return f"{self._directory}/worker-{f'{cell}-' if cell else ''}{i}.sock"

    def _scheduler_socket(self, cell: int, i: int) -> str:
        kind = "standby" if i else "scheduler"
        return f"{self._directory}/{kind}{f'-{cell}' if cell else ''}.sock"

    def _model_flags(self, cell: int) -> tuple[str, ...]:
        name = self._names[cell]
        return ("--model", self._models[name], "--served-model-name", name)

    def _listening_flags(self) -> tuple[str, ...]:
        """Return the flags that say where each router listens for clients."""
        flags: tuple[str, ...] = ("--grpc-port", str(self._ports.grpc_port))
        if self._settings.uds is not None:
            flags = ("--uds", str(self._settings.uds.absolute()))
        if self._settings.routers > 1:
            flags += ("--shared-http-port", str(self._ports.http_port))
        return flags

    def _further_cells(self) -> tuple[str, ...]:
        """Return a router's --cell flags, one for each model after the first."""
        flags: tuple[str, ...] = ()
        for cell, name in enumerate(self._names[1:], 1):
            flags += ("--cell", f"{name}={self._models[name]}@{self.scheduler_targets(cell)}")
        return flags


def folder_of(name: str) -> str:
    """Convert a model's name for use in names of files and processes."""
    return name.replace("/", "-")


def _flags(settings: UpSettings, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of the flags `names` that are set, as arguments for a command line.

    A flag whose value is an empty string counts as not set.
    """
    flags: list[str] = []
    for name in names:
        value = getattr(settings, name)
        if isinstance(value, tuple):
            value = ",".join(value)
        if value is not None and value != "":
            flags += ("--" + name.replace("_", "-"), str(value))
    return tuple(flags)


def _audit_log(settings: UpSettings, index: int) -> tuple[str, ...]:
    if settings.audit_log is None:
        return ()
    path = settings.audit_log.absolute()
    return ("--audit-log", str(path.with_name(f"{path.name}-{index}") if index else path))


def _secrets(settings: UpSettings) -> dict[str, str]:
    """Return API keys as environment variables, because other users can read a command line."""
    keys = ",".join(key.get_secret_value() for key in settings.api_key)
    return {f"{ENV_PREFIX}API_KEY": keys} if keys else {}


def _turn_store(settings: UpSettings, name: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return --turn-store, the store of responses, as an environment variable.

    By default, the store is a file whose name contains the model's name and the service's port, so
    that a restarted service finds the file again.
    """
    place = settings.turn_store
    if not place and settings.http_port and not settings.attached:
        place = str(_data_file(environment, "turns", f"{name}.sqlite"))
    return {f"{ENV_PREFIX}TURN_STORE": place} if place not in ("", "none") else {}


def _state_file(settings: UpSettings, name: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    if not settings.http_port or settings.attached:
        return ()
    return ("--state-file", str(_data_file(environment, "state", f"{name}.json")))


def _data_file(environment: Mapping[str, str], kind: str, name: str) -> Path:
    data = environment.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data, "quire", kind, name.replace("/", "-"))


def _without_our_own(environment: Mapping[str, str]) -> dict[str, str]:
    """Drop variables that set flags of `up`; workers must not see QUIRE_HTTP_PORT, for example."""
    own = {ENV_PREFIX + name.upper() for name in UpSettings.model_fields}
    return {name: value for name, value in environment.items() if name.upper() not in own}


def _devices(settings: UpSettings, index: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variable that assigns GPUs to worker `index`.

    Each of several workers gets separate GPUs; a single worker needs no variable.
    """
    if settings.num_workers == 1:
        return {}
    count = settings.devices_per_worker
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    devices = (
        visible.split(",") if visible else [str(i) for i in range(settings.num_workers * count)]
    )
    own = [devices[i % len(devices)] for i in range(index * count, (index + 1) * count)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(own))}


def _role(settings: UpSettings, index: int) -> tuple[str, ...]:
    if not settings.prefill_workers:
        return ()
    return ("--role", "prefill" if index < settings.prefill_workers else "decode")


def _num_threads(settings: UpSettings) -> tuple[str, ...]:
    if settings.num_threads is not None:
        return ("--num-threads", str(settings.num_threads))
    num_loaded = settings.num_workers * _num_loaded(settings)
    if num_loaded == 1:
        return ()
    # Otherwise each worker would use every core and slow down the others.
    return ("--num-threads", str(max(1, (os.cpu_count() or 1) // num_loaded)))


def _num_loaded(settings: UpSettings) -> int:
    """Return the maximum number of models that are loaded at the same time."""
    num_models = max(1, len(settings.model))
    return min(num_models, settings.on_demand or num_models)


def _share_of_device(settings: UpSettings) -> tuple[str, ...]:
    """Return the flags for workers of several models on one device.

    Models that are loaded on demand begin unloaded. Models that are loaded at the same time get
    equal shares of a GPU's memory.
    """
    flags: tuple[str, ...] = () if settings.on_demand is None else ("--unloaded",)
    if settings.gpu_memory_utilization is None and (num_loaded := _num_loaded(settings)) > 1:
        flags += ("--gpu-memory-utilization", f"{GPU_MEMORY_UTILIZATION / num_loaded:.3f}")
    return flags
