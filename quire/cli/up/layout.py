"""Plans a service before it starts: its models, its ports, and its processes."""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from model_files.errors import ModelError
from model_files.locate import DEFAULT_CACHE_DIR, ModelPlace, name_of, place_of
from model_files.old_tokenizer import TOKENIZER, has_tokenizer
from quire.cli.up import ports
from quire.cli.up.child import ProcessSpec
from quire.cli.up.demo_model import DemoModelError, fetch_demo_model
from quire.cli.up.processes import Processes, ServicePorts, folder_of
from quire.cli.up.service_dir import ServiceInfo
from quire.cli.up.settings import UpSettings

SHIPPED_MODEL: Final = Path(__file__).parents[3] / "models" / "quire-tiny-python"
"""The path, in a checkout, of the model that Quire ships."""


_NOT_OF_THE_SERVICE: Final = {
    *("detach", "demo", "verbose", "attached"),  # about one call of `quire up`
    # Locations, which `ServiceInfo` has elsewhere
    *("model", "host", "http_port", "grpc_port", "uds"),
    "api_key",  # a secret
    "turn_store",  # may have a password
}
"""Flags that `ServiceInfo.flags` leaves out."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One service, ready to start."""

    service: ServiceInfo
    """The service's description, still without its processes."""
    specs: tuple[ProcessSpec, ...]


def choose_models(settings: UpSettings) -> Mapping[str, str]:
    """Return the models' locations by name, in the order of --model.

    Paths become absolute; names on the hub and URLs stay as they are. Without --model, the shipped
    model is chosen, or with --demo the demo model, which is downloaded if necessary. If the
    download fails, the shipped model is chosen.

    Raises:
        ModelError: A location holds no model, or two models have the same name.
    """
    models = [_checked(model) for model in settings.model] or [_default_model(settings)]
    names = settings.served_model_name or tuple(map(name_of, models))
    for name in names:
        if [folder_of(each) for each in names].count(folder_of(name)) > 1:
            raise ModelError(
                f"--model: two models have the name {name!r}; set others with --served-model-name"
            )
    return dict(zip(names, models, strict=True))


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


def choose_ports(settings: UpSettings) -> ServicePorts:
    """Choose the service's ports: those that flags give, and free ones where flags give none.

    Raises:
        PortError: A port that a flag gives cannot be used; the message names the flag.
    """
    taken: set[int] = set()

    def choose(flag: str, asked: int | None, default: int = 0) -> int:
        if asked:
            port = ports.require_free(settings.host, asked, flag)
        else:  # any free port if the flag is 0
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
    # If there is one router, it listens on the service's port itself.
    num_own = settings.routers if settings.routers > 1 else 0
    routers = tuple(choose("--http-port", 0) for _ in range(num_own)) or (http,)
    if settings.standby:
        for ports_of_model in schedulers:
            ports_of_model.append(choose("--scheduler-http-port", 0))
    return ServicePorts(http, grpc, routers, tuple(map(tuple, schedulers)), tuple(workers))


def plan(
    settings: UpSettings,
    models: Mapping[str, str],
    chosen: ServicePorts,
    directory: Path,
    environment: Mapping[str, str],
) -> Layout:
    """Plan the service's processes, which talk through Unix sockets in `directory`."""
    processes = Processes(settings, models, chosen, directory, environment)
    targets = {name: processes.scheduler_targets(cell) for cell, name in enumerate(models)}
    first, *others = (f"unix:{path}" for path in processes.operator_sockets)
    model_name, model = next(iter(models.items()))
    service = ServiceInfo(
        pid=os.getpid(),
        model=model,
        model_name=model_name,
        http_address=ports.join(ports.reachable(settings.host), chosen.http_port),
        grpc_target=grpc_target(settings, chosen.grpc_port),
        scheduler_target=targets[model_name],
        models=models,
        scheduler_targets=targets,
        operator_target=first,
        other_operator_targets=tuple(others),
        flags=described_flags(settings),
        has_tls=settings.tls_cert is not None,
        log_dir=f"{directory}/logs",
    )
    # Workers start first, because they take longest.
    specs = (*processes.workers(), *processes.schedulers(), *processes.routers())
    return Layout(service, specs)


def described_flags(settings: UpSettings, names: Collection[str] | None = None) -> dict[str, str]:
    """Return the values of flags by name, without the flags in `_NOT_OF_THE_SERVICE`.

    If `names` is given, return only the flags in `names`.
    """
    values = settings.model_dump(mode="json", exclude=_NOT_OF_THE_SERVICE)
    return {name: str(value) for name, value in values.items() if names is None or name in names}


def grpc_target(settings: UpSettings, grpc_port: int) -> str:
    """Return the gRPC target at which clients on this machine reach the router."""
    if settings.uds is not None:
        return f"unix:{settings.uds.absolute()}"
    return ports.join(ports.reachable(settings.host), grpc_port)
