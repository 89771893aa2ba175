"""`quire status`: shows services' processes, each with its health, and each service's load."""

import asyncio
from collections.abc import Sequence

import aiohttp
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from contract.errors import QuireError
from quire.cli.invocation import invocation
from quire.cli.readiness import Readiness, probe
from quire.cli.settings import StatusSettings
from quire.cli.target import find_service, open_client, services_at
from quire.cli.up.service_dir import ServiceInfo
from quire.client.types import Load
from rpc.settings import parse_settings

_TIMEOUT_S = 3.0
_PROBE_TIMEOUT_S = 10.0
"""A long timeout, because a healthy process on a busy machine may answer late."""


def main(argv: Sequence[str]) -> int:
    settings = parse_settings(StatusSettings, "quire status", argv)
    console = Console(highlight=False)
    if settings.target:
        return 0 if _show_load(console, settings.target, settings) else 1
    if settings.http_port is None:
        services = sorted(services_at(None), key=lambda service: service.http_address)
    else:
        services = [find_service(settings.http_port)]
    if not services:
        console.print(
            f"no service of yours is up on this machine; `{invocation()} up` starts one",
            markup=False,
            soft_wrap=True,
        )
        return 1
    all_well = [_show_service(console, service, settings) for service in services]
    return 0 if all(all_well) else 1


def _show_service(console: Console, service: ServiceInfo, settings: StatusSettings) -> bool:
    for name, model in (service.models or {service.model_name: service.model}).items():
        console.print(f"[bold]{escape(name)}[/bold]  {escape(model)}")
    console.print(
        f"HTTP {service.http_address}, gRPC {service.grpc_target}, supervisor pid {service.pid},"
        f" logs {service.log_dir}",
        markup=False,
        soft_wrap=True,
    )
    answers = asyncio.run(_probe_all(service))
    table = Table("process", "pid", "status", "restarts", "HTTP")
    for process, answer in zip(service.processes, answers, strict=True):
        table.add_row(
            process.name,
            "-" if process.pid is None else str(process.pid),
            _describe(answer),
            str(process.num_restarts),
            process.http_address,
        )
    console.print(table)
    names = [*service.models] if len(service.models) > 1 else [""]
    are_loaded = [_show_load(console, service.grpc_target, settings, name) for name in names]
    return all(are_loaded) and all(answer is not None and answer.ready for answer in answers)


async def _probe_all(service: ServiceInfo) -> list[Readiness | None]:
    async with aiohttp.ClientSession() as session:
        return await asyncio.gather(
            *(
                probe(
                    session,
                    process.http_address,
                    tls=service.has_tls,
                    timeout_s=_PROBE_TIMEOUT_S,
                )
                for process in service.processes
            )
        )


def _describe(readiness: Readiness | None) -> str:
    if readiness is None:
        return "[red]does not answer[/red]"
    percent = "" if readiness.progress is None else f" {readiness.progress:.0%}"
    colour = "green" if readiness.ready else "yellow"
    return f"[{colour}]{escape(readiness.status)}{percent}[/{colour}]"


def _show_load(console: Console, target: str, settings: StatusSettings, model: str = "") -> bool:
    """Show the load of `model`, or of the service if `model` is empty.

    Return whether the router answered.
    """
    title = f"{escape(model)}: " if model else ""
    try:
        with open_client(target, settings) as client:
            load = client.load(model=model, timeout_s=_TIMEOUT_S)
    except QuireError as error:
        console.print(
            f"{title}load: [red]no answer from {target}: {escape(str(error))}[/red]", soft_wrap=True
        )
        return False
    console.print(title + describe_load(load), soft_wrap=True)
    return True


def describe_load(load: Load) -> str:
    """Describe the load in several lines: sequences, the blocks of each tier, the prefix cache."""
    num_used = load.num_blocks - load.num_free_blocks - load.num_cached_blocks
    sequences = (
        f"load: {load.num_requests_running} of {load.max_num_seqs} sequences running,"
        f" {load.num_requests_waiting} waiting; KV blocks of {load.block_size} tokens:"
        f" {num_used} used, {load.num_cached_blocks} cached, {load.num_free_blocks} free;"
        f" {load.num_workers} worker{'' if load.num_workers == 1 else 's'}"
    )
    if load.num_unloaded_workers:
        sequences += f", {load.num_unloaded_workers} unloaded"
        if not load.num_workers and load.num_requests_waiting:
            sequences += f"; {load.num_requests_waiting} requests wait for a model to be loaded"
    device = (
        f"device blocks: {_share(num_used, load.num_blocks)} used, with"
        f" {_share(load.num_slots_written, load.num_slots_held)} of their token slots filled;"
        f" {load.num_pinned_blocks} pinned; {load.fragmentation:.0%} fragmented,"
        f" {load.num_moved_blocks} moved"
    )
    lines = [sequences, device]
    if load.num_host_blocks:
        num_used = load.num_host_blocks - load.num_free_host_blocks - load.num_cached_host_blocks
        lines.append(
            f"host blocks: {_share(num_used, load.num_host_blocks)} used,"
            f" {load.num_cached_host_blocks} cached, {load.num_free_host_blocks} free;"
            f" {load.host_fragmentation:.0%} fragmented"
        )
    if load.num_disk_blocks:
        num_used = load.num_disk_blocks - load.num_free_disk_blocks - load.num_cached_disk_blocks
        lines.append(
            f"disk blocks: {_share(num_used, load.num_disk_blocks)} used,"
            f" {load.num_cached_disk_blocks} cached, {load.num_free_disk_blocks} free"
        )
    lines.append(
        f"prefix cache: {_share(load.num_prefix_cache_hits, load.num_prefix_cache_queries)} of"
        f" {load.num_prefix_cache_queries} tokens found"
    )
    return "\n".join(lines)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "none"
