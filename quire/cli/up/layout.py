"""The processes of one service: command lines, addresses, environment."""

import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from model_files.errors import ModelError
from model_files.locate import DEFAULT_CACHE_DIR, ModelPlace, name_of, place_of
from model_files.old_tokenizer import TOKENIZER, has_tokenizer
from quire.cli.up import ports
from quire.cli.up.child import ProcessSpec
from quire.cli.up.demo_model import DemoModelError, fetch_demo_model
from quire.cli.up.service_dir import ServiceInfo
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
"""A scheduler's exit code when another one has taken over its workers, as in `scheduler_svc`."""
GPU_MEMORY_UTILIZATION: Final = 0.9
"""The worker's default."""
SHIPPED_MODEL: Final = Path(__file__).parents[3] / "models" / "quire-tiny-python"
"""The path of the shipped model in a checkout."""


_NOT_OF_THE_SERVICE: Final = {
    *("detach", "demo", "verbose", "attached"),  # about one call of `quire up`
    # Locations, which `ServiceInfo` has elsewhere
    *("model", "host", "http_port", "grpc_port", "uds"),
    "api_key",  # a secret
    "turn_store",  # may have a password
}
"""Flags that `ServiceInfo.flags` leaves out."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """The ports of a service; each was free when it was chosen."""

    http_port: int
    grpc_port: int
    """0: the router listens on a Unix socket instead."""
    router_http_ports: tuple[int, ...]
    """The HTTP port of each router; with one router, `http_port`."""
    scheduler_http_ports: tuple[tuple[int, ...], ...]
    """The port of each model's scheduler, and of its standby."""
    worker_http_ports: tuple[tuple[int, ...], ...]
    """The ports of each model's workers."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One service, ready to start."""

    service: ServiceInfo
    """The description before the start, when no process has a pid."""
    specs: tuple[ProcessSpec, ...]


def choose_models(settings: UpSettings) -> Mapping[str, str]:
    """Return the models' locations by name, in order.

    Paths become absolute; names on the hub and URLs stay as they are. With --demo alone, the demo's
    model is downloaded if necessary; without a network, the shipped model is used.

    Raises:
        ModelError: A location cannot be a model, or two models have the same name.
    """
    models = [_checked(model) for model in settings.model] or [_default_model(settings)]
    names = settings.served_model_name or tuple(map(name_of, models))
    for name in names:
        if [_folder(each) for each in names].count(_folder(name)) > 1:
            raise ModelError(
                f"--model: two models have the name {name!r}; set others with --served-model-name"
            )
    return dict(zip(names, models, strict=True))


def _folder(name: str) -> str:
    """Convert a name for use in names of files and processes."""
    return name.replace("/", "-")


def _default_model(settings: UpSettings) -> str:
    if settings.demo and settings.simulate is None:
        try:
            return str(fetch_demo_model(settings.cache_dir or DEFAULT_CACHE_DIR))
        except DemoModelError as error:
            print(f"the chat model cannot be fetched: {error}\nserving the shipped model instead")
    if not SHIPPED_MODEL.is_dir():
        raise ModelError(
            f"--model: is not given, and the model that Quire ships is not at {SHIPPED_MODEL}"
        )
    return str(SHIPPED_MODEL)


def _checked(model: str) -> str:
    place = place_of(model)
    if place in (ModelPlace.HUB, ModelPlace.URL):
        return model
    path = Path(model).resolve()
    if place is ModelPlace.DIRECTORY:
        for name, is_there in (
            ("config.json", (path / "config.json").is_file()),
            (TOKENIZER, has_tokenizer(path)),
        ):
            if not is_there:
                raise ModelError(f"--model: {model}: it must have a {name}")
    return str(path)


def choose_ports(settings: UpSettings) -> Addresses:
    """Choose a port for each flag; raises PortError, which names the flag, if a port is in use."""
    taken: set[int] = set()

    def choose(flag: str, asked: int | None, default: int = 0) -> int:
        if asked:
            port = ports.require_free(settings.host, asked, flag)
        else:  # any port if 0 is requested
            port = ports.prefer(settings.host, default if asked is None else 0, taken)
        if port in taken:
            raise ports.PortError(f"{flag}: {port}: another flag has the same port")
        taken.add(port)
        return port

    http = choose("--http-port", settings.http_port)
    grpc = 0 if settings.uds else choose("--grpc-port", settings.grpc_port)
    num_workers = 1 if settings.simulate is not None else settings.num_workers
    schedulers, workers = [], []
    for model in range(max(1, len(settings.model))):
        first_port = settings.scheduler_http_port
        asked, default = first_port and first_port + model, http + 1 + model * (1 + num_workers)
        schedulers.append([choose("--scheduler-http-port", asked, default)])
        first, num_before = settings.worker_http_port, model * num_workers
        workers.append(
            tuple(
                choose(
                    "--worker-http-port",
                    first + num_before + i if first else first,
                    default + 1 + i,
                )
                for i in range(num_workers)
            )
        )
    # A single router listens on the service's port itself.
    num_own = settings.routers if settings.routers > 1 else 0
    routers = tuple(choose("--http-port", 0) for _ in range(num_own)) or (http,)
    if settings.standby:
        for ports_of_model in schedulers:
            ports_of_model.append(choose("--scheduler-http-port", 0))
    return Addresses(http, grpc, routers, tuple(map(tuple, schedulers)), tuple(workers))


def plan(
    settings: UpSettings,
    models: Mapping[str, str],
    chosen: Addresses,
    directory: Path,
    environment: Mapping[str, str],
) -> Layout:
    """Make the command lines. The processes talk through Unix sockets in `directory`."""
    common = _flags(settings, COMMON_FLAGS)
    environment = _without_our_own(environment)
    host = ports.reachable(settings.host)
    names = [*models]
    num_workers = settings.simulate or settings.num_workers

    def named(cell: int) -> tuple[str, ...]:
        return ("--model", models[names[cell]], "--served-model-name", names[cell])

    # Numbered, because a socket's path must be short.
    def worker_socket(cell: int, i: int) -> str:
        return f"{directory}/worker-{f'{cell}-' if cell else ''}{i}.sock"

    def scheduler_socket(cell: int, i: int) -> str:
        return f"{directory}/{'standby' if i else 'scheduler'}{f'-{cell}' if cell else ''}.sock"

    def scheduler_targets(cell: int) -> str:
        """Return the target of a model's scheduler, and that of its standby."""
        numbers = range(len(chosen.scheduler_http_ports[cell]))
        return ",".join(f"unix:{scheduler_socket(cell, i)}" for i in numbers)

    def process_name(kind: str, cell: int, suffix: str = "") -> str:
        """Return a process's name, which has its model's name if there are several models."""
        return f"{kind}{f'-{_folder(names[cell])}' if len(names) > 1 else ''}{suffix}"

    def spec(
        name: str, module: str, http_port: int, *flags: str, group: int, **more: str
    ) -> ProcessSpec:
        return ProcessSpec(
            name=name,
            # -P: a file http.py in the working directory must not hide Python's own.
            argv=(
                sys.executable,
                "-P",
                "-m",
                module,
                "--http-port",
                str(http_port),
                *common,
                *flags,
            ),
            http_address=ports.join(host, http_port),
            stop_group=group,
            environment={**environment, **more},
        )

    def worker(cell: int, i: int) -> ProcessSpec:
        name = process_name("worker", cell, f"-{i}")
        return spec(
            name,
            "gpu_worker",
            chosen.worker_http_ports[cell][i],
            *named(cell),
            *("--uds", worker_socket(cell, i), "--worker-id", name, "--device", settings.device),
            *_flags(settings, ANY_WORKER_FLAGS + DEVICE_WORKER_FLAGS),
            *_share_of_device(settings),
            *_num_threads(settings),
            *_role(settings, i),
            group=2,
            **_devices(settings, i, environment),
        )

    def simulated(cell: int) -> ProcessSpec:
        several = f"{directory}/worker{f'-{cell}' if cell else ''}.sock"
        return spec(
            process_name("sim-workers", cell),
            "sim_worker",
            chosen.worker_http_ports[cell][0],
            *named(cell),
            *("--uds", several if num_workers > 1 else worker_socket(cell, 0)),
            *("--count", str(num_workers), "--worker-id", process_name("sim", cell)),
            *_flags(settings, ANY_WORKER_FLAGS),
            group=2,
        )

    def scheduler(cell: int, i: int) -> ProcessSpec:
        workers = ",".join(f"unix:{worker_socket(cell, i)}" for i in range(num_workers))
        name = process_name("scheduler", cell, f"-{i}" if settings.standby else "")
        made = spec(
            name,
            "scheduler_svc",
            chosen.scheduler_http_ports[cell][i],
            *("--uds", scheduler_socket(cell, i), "--workers", workers),
            *_flags(settings, SCHEDULER_FLAGS),
            *_state_file(settings, f"{names[cell]}-{chosen.http_port}", environment),
            # Both get --standby, so whichever restarts becomes the standby.
            *(("--standby", "--standby-http", "--scheduler-id", name) if settings.standby else ()),
            group=1,
        )
        return replace(made, harmless_exit_code=EXIT_STALE_EPOCH)

    listen: tuple[str, ...] = ("--grpc-port", str(chosen.grpc_port))
    if settings.uds is not None:
        listen = ("--uds", str(settings.uds.absolute()))
    router_names = ["router"]
    if settings.routers > 1:
        listen += ("--shared-http-port", str(chosen.http_port))
        router_names = [f"router-{i}" for i in range(settings.routers)]
    operator_sockets = [Path(directory, f"{name}.sock").absolute() for name in router_names]
    if settings.operator_uds is not None:
        operator_sockets = [settings.operator_uds.absolute()]

    further: tuple[str, ...] = ()
    for cell in range(1, len(names)):
        model = f"{names[cell]}={models[names[cell]]}@{scheduler_targets(cell)}"
        further += ("--cell", model)

    def router(i: int) -> ProcessSpec:
        return spec(
            router_names[i],
            "router",
            chosen.router_http_ports[i],
            *named(0),
            *("--scheduler", scheduler_targets(0), *listen),
            *further,
            *("--operator-uds", str(operator_sockets[i])),
            *_flags(settings, ROUTER_FLAGS),
            *_audit_log(settings, i),
            *(() if settings.reflection else ("--no-reflection",)),
            *(() if settings.ui else ("--no-ui",)),
            # Not for the other processes, which listen on Unix sockets.
            *(("--local-drain",) if settings.local_drain else ()),
            group=0,
            **_secrets(settings),
            **_turn_store(settings, f"{names[0]}-{chosen.http_port}", environment),
        )

    service = ServiceInfo(
        pid=os.getpid(),
        model=models[names[0]],
        model_name=names[0],
        http_address=ports.join(host, chosen.http_port),
        grpc_target=grpc_target(settings, chosen.grpc_port),
        scheduler_target=scheduler_targets(0),
        models=models,
        scheduler_targets={name: scheduler_targets(cell) for cell, name in enumerate(names)},
        operator_target=f"unix:{operator_sockets[0]}",
        other_operator_targets=tuple(f"unix:{path}" for path in operator_sockets[1:]),
        flags=described_flags(settings),
        has_tls=settings.tls_cert is not None,
        log_dir=f"{directory}/logs",
    )
    cells = range(len(names))
    if settings.simulate is None:
        workers = [worker(cell, i) for cell in cells for i in range(num_workers)]
    else:
        workers = [simulated(cell) for cell in cells]
    schedulers = [
        scheduler(cell, i) for cell in cells for i in range(len(chosen.scheduler_http_ports[cell]))
    ]
    # Workers start first, because they take longest.
    return Layout(service, (*workers, *schedulers, *map(router, range(settings.routers))))


def described_flags(settings: UpSettings, names: Collection[str] | None = None) -> dict[str, str]:
    """Describe the flags that define the service, or those in `names`; API keys are left out."""
    values = settings.model_dump(mode="json", exclude=_NOT_OF_THE_SERVICE)
    return {name: str(value) for name, value in values.items() if names is None or name in names}


def grpc_target(settings: UpSettings, grpc_port: int) -> str:
    """Return the router's target for clients on this machine."""
    if settings.uds is not None:
        return f"unix:{settings.uds.absolute()}"
    return ports.join(ports.reachable(settings.host), grpc_port)


def _flags(settings: UpSettings, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the flags that are set; an empty string means the process's default."""
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
    """Return the turn store as an environment variable.

    By default it is a file that later starts find.
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
    """Drop variables that set flags of `up`; QUIRE_HTTP_PORT, for example, is not for workers."""
    own = {ENV_PREFIX + name.upper() for name in UpSettings.model_fields}
    return {name: value for name, value in environment.items() if name.upper() not in own}


def _devices(settings: UpSettings, index: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Assign separate GPUs to each of several workers."""
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
    """Return how many models are loaded at once."""
    num_models = max(1, len(settings.model))
    return min(num_models, settings.on_demand or num_models)


def _share_of_device(settings: UpSettings) -> tuple[str, ...]:
    """Divide a GPU among the models that are loaded at once; others are loaded on demand."""
    flags: tuple[str, ...] = () if settings.on_demand is None else ("--unloaded",)
    if settings.gpu_memory_utilization is None and (num_loaded := _num_loaded(settings)) > 1:
        flags += ("--gpu-memory-utilization", f"{GPU_MEMORY_UTILIZATION / num_loaded:.3f}")
    return flags
