"""What the processes of one service are: command lines, addresses, environment."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quire.cli.up import ports
from quire.cli.up.child import ProcessSpec
from quire.cli.up.settings import UpSettings
from rpc.settings import ENV_PREFIX

SHIPPED_MODEL: Final = Path(__file__).parents[3] / "models" / "quire-tiny-python"
"""Where a checkout has it."""

_COMMON: Final = (
    "host",
    "tls_ca",
    "tls_cert",
    "tls_key",
    "tls_server_name",
    "tls_client_ca",
    "max_message_mb",
    "max_metadata_kb",
    "max_concurrent_streams",
    "drain_s",
    "log_level",
    "log_format",
    "otlp_traces_endpoint",
    "timeline_dir",
)
_WORKER: Final = (
    "model_class",
    "lora",
    "dtype",
    "quantization",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_blocks",
    "block_size",
    "kv_cache_memory_gb",
    "kv_cache_dtype",
    "kv_cache_dtype_skip_layers",
    "host_kv_memory_gb",
    "host_kv_codec",
    "disk_kv_memory_gb",
    "disk_kv_dir",
    "disk_kv_codec",
    "gpu_memory_utilization",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "speculative",
    "num_draft_tokens",
    "draft_model",
    "ngram_min",
    "ngram_max",
)
_ROUTER: Final = ("api_keys_file", "trace_sample_ratio")
_SCHEDULER: Final = (
    "policy",
    "preemption_mode",
    "max_decode_slowdown",
    "max_prompt_step_s",
    "eviction",
)

_SIM_WORKERS: Final = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_blocks",
    "block_size",
    "host_kv_memory_gb",
    "disk_kv_memory_gb",
)


class ModelError(Exception):
    """There is no model to serve. The message says what to do."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a service will listen; every port is free when this is made."""

    http_port: int
    grpc_port: int
    scheduler_http_port: int
    worker_http_ports: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """One service, ready to be started."""

    model: Path
    model_name: str
    http_address: str
    """Where this machine reaches the router's HTTP."""
    grpc_target: str
    scheduler_target: str
    """The scheduler's, which only processes of the user's own reach."""
    specs: tuple[ProcessSpec, ...]
    has_tls: bool = False
    """Whether what listens at TCP ports does so with TLS."""


def find_model(settings: UpSettings) -> Path:
    """Give the model's directory; raise ModelError if it is none."""
    if settings.model is None:
        if not SHIPPED_MODEL.is_dir():
            raise ModelError(
                f"--model: is not given, and the model that Quire ships is not at {SHIPPED_MODEL}"
            )
        return SHIPPED_MODEL
    if not settings.model.is_dir():
        raise ModelError(f"--model: {settings.model}: it must be a Hugging Face model directory")
    for name in ("config.json", "tokenizer.json"):
        if not (settings.model / name).is_file():
            raise ModelError(f"--model: {settings.model}: it must have a {name}")
    return settings.model.resolve()


def choose_ports(settings: UpSettings) -> Addresses:
    """Find every port; raise PortError naming the flag of one that is in use."""
    host = settings.host
    http_port = ports.require_free(host, settings.http_port, "--http-port")
    taken = {http_port}
    grpc_port = 0
    if settings.uds is None:
        if settings.grpc_port:
            grpc_port = ports.require_free(host, settings.grpc_port, "--grpc-port")
        else:  # any, but for the one that is taken and nobody listens at yet
            grpc_port = ports.prefer(host, 0, taken)
        if grpc_port in taken:
            raise ports.PortError(f"--grpc-port: {grpc_port}: is --http-port too")
        taken.add(grpc_port)

    def choose(asked: int | None, preferred: int, flag: str) -> int:
        if not asked:
            port = ports.prefer(host, preferred if asked is None else 0, taken)
        else:
            port = ports.require_free(host, asked, flag)
        if port in taken:
            raise ports.PortError(f"{flag}: {port}: another flag has it too")
        taken.add(port)
        return port

    scheduler = choose(settings.scheduler_http_port, http_port + 1, "--scheduler-http-port")
    first = settings.worker_http_port
    workers = tuple(
        choose(first + i if first else first, http_port + 2 + i, "--worker-http-port")
        for i in range(1 if settings.simulate is not None else settings.workers)
    )
    return Addresses(http_port, grpc_port, scheduler, workers)


def plan(
    settings: UpSettings,
    model: Path,
    chosen: Addresses,
    socket_dir: Path,
    environment: Mapping[str, str],
) -> Layout:
    """Make the command lines. Between the processes are Unix sockets in `socket_dir`."""
    common = _flags(settings, _COMMON)
    environment = _without_our_own(environment)
    host = ports.reachable(settings.host)
    model_name = settings.served_model_name or model.name
    named = ("--model", str(model), "--served-model-name", model_name)
    num_workers = settings.simulate or settings.workers
    sockets = [f"{socket_dir}/worker-{i}.sock" for i in range(num_workers)]

    def spec(
        name: str, module: str, http_port: int, *flags: str, group: int, **more: str
    ) -> ProcessSpec:
        return ProcessSpec(
            name=name,
            argv=(sys.executable, "-m", module, "--http-port", str(http_port), *common, *flags),
            http_address=ports.join(host, http_port),
            stop_group=group,
            environment={**environment, **more},
        )

    scheduler_socket = f"{socket_dir}/scheduler.sock"
    listen = ("--grpc-port", str(chosen.grpc_port))
    if settings.uds is not None:
        listen = ("--uds", str(settings.uds.absolute()))
    router = spec(
        "router",
        "router",
        chosen.http_port,
        *named,
        *("--scheduler", f"unix:{scheduler_socket}", *listen),
        *_flags(settings, _ROUTER),
        *(() if settings.reflection else ("--no-reflection",)),
        *(() if settings.ui else ("--no-ui",)),
        *(("--local-drain",) if settings.local_drain else ()),  # the others listen on Unix sockets
        group=0,
        **_secrets(settings),
    )
    scheduler = spec(
        "scheduler",
        "scheduler_svc",
        chosen.scheduler_http_port,
        *("--uds", scheduler_socket, "--workers", ",".join(f"unix:{path}" for path in sockets)),
        *_flags(settings, _SCHEDULER),
        group=1,
    )
    simulated = spec(
        "sim-workers",
        "sim_worker",
        chosen.worker_http_ports[0],
        *named,
        *("--uds", f"{socket_dir}/worker.sock" if num_workers > 1 else sockets[0]),
        *("--count", str(num_workers), "--worker-id", "sim"),
        *_flags(settings, _SIM_WORKERS),
        group=2,
    )
    workers = [
        spec(
            f"worker-{i}",
            "gpu_worker",
            chosen.worker_http_ports[i],
            *named,
            *("--uds", sockets[i], "--worker-id", f"worker-{i}", "--device", settings.device),
            *_flags(settings, _WORKER),
            *_num_threads(settings),
            group=2,
            **_share(settings, i, environment),
        )
        for i in range(settings.workers)
        if settings.simulate is None
    ]
    return Layout(
        model=model,
        model_name=model_name,
        http_address=ports.join(host, chosen.http_port),
        grpc_target=grpc_target(settings, chosen.grpc_port),
        scheduler_target=f"unix:{scheduler_socket}",
        # Workers first: they take longest.
        specs=(*(workers or [simulated]), scheduler, router),
        has_tls=settings.tls_cert is not None,
    )


def grpc_target(settings: UpSettings, grpc_port: int) -> str:
    """Give the router's target, as this machine reaches it."""
    if settings.uds is not None:
        return f"unix:{settings.uds.absolute()}"
    return ports.join(ports.reachable(settings.host), grpc_port)


def _flags(settings: UpSettings, names: tuple[str, ...]) -> tuple[str, ...]:
    """Pass on what is set; an empty string is every process's default."""
    flags: list[str] = []
    for name in names:
        value = getattr(settings, name)
        if isinstance(value, tuple):
            value = ",".join(value)
        if value is not None and value != "":
            flags += ("--" + name.replace("_", "-"), str(value))
    return tuple(flags)


def _secrets(settings: UpSettings) -> dict[str, str]:
    """Give what others must not see, as they would in a command line."""
    keys = ",".join(key.get_secret_value() for key in settings.api_key)
    return {f"{ENV_PREFIX}API_KEY": keys} if keys else {}


def _without_our_own(environment: Mapping[str, str]) -> dict[str, str]:
    """Drop the variables that are flags of `up`: QUIRE_HTTP_PORT, say, means the router's only."""
    own = {ENV_PREFIX + name.upper() for name in UpSettings.model_fields}
    return {name: value for name, value in environment.items() if name.upper() not in own}


def _share(settings: UpSettings, index: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Give each of several workers GPUs of its own."""
    if settings.workers == 1:
        return {}
    count = settings.devices_per_worker
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(i) for i in range(settings.workers * count)]
    own = [devices[i % len(devices)] for i in range(index * count, (index + 1) * count)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(own))}


def _num_threads(settings: UpSettings) -> tuple[str, ...]:
    if settings.num_threads is not None:
        return ("--num-threads", str(settings.num_threads))
    if settings.workers == 1:
        return ()
    # Else each takes every core, and they wait for one another.
    return ("--num-threads", str(max(1, (os.cpu_count() or 1) // settings.workers)))
