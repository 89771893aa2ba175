"""The process of simulated workers: constructs all their parts and runs them."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import structlog
from pydantic import TypeAdapter

from contract.info import WorkerInfo, new_instance_id
from contract.worker_limits import Limits
from gpu_worker.service.api import WorkerService
from gpu_worker.weights.json_fields import ModelError, read_json
from model_files.locate import find_model
from rpc.grpc_server import Server, make_grpc_server, start_grpc_server
from rpc.health import Health
from rpc.server import Addresses, serve
from sim_worker.draw import Script
from sim_worker.settings import SimWorkerSettings
from sim_worker.steps import SimulatedSteps
from sim_worker.time_model import TimeModel

_DEFAULT_VOCAB_SIZE = 32_000
_DEFAULT_MODEL_LEN = 8192
_PREFILL_TOKENS = 512
_STOP_S = 2.0

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The part of a model that a simulation needs."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int


async def run_sim_workers(
    settings: SimWorkerSettings,
    *,
    on_started: Callable[[Addresses], Awaitable[None]] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or `stop`, then drain.

    `on_started` runs when all workers listen, with the addresses of the first worker.

    Raises:
        ModelError: The model's config.json cannot be used, or contradicts the settings.
    """
    vocabulary = find_vocabulary(settings)
    health = Health()
    first, *others = [settings.of_worker(index) for index in range(settings.count)]
    workers = {each.worker_id: make_worker(each, vocabulary) for each in (first, *others)}
    servers: list[Server] = []

    async def start(addresses: Addresses) -> None:
        for each in others:
            server = await _listen(each, workers[each.worker_id])
            # Registered at once, so that it is stopped if the next server fails
            servers.append(server)
        health.set_ready()
        if on_started is not None:
            await on_started(addresses)

    async def drain() -> None:
        await asyncio.gather(*(worker.drain(settings.drain_s / 2) for worker in workers.values()))

    try:
        await serve(
            first,
            health=health,
            services=[workers[first.worker_id].service()],
            on_started=start,
            on_drain=drain,
            num_live=lambda: sum(worker.num_live_seqs for worker in workers.values()),
            stop=stop,
        )
    finally:
        await asyncio.gather(*(server.stop(_STOP_S) for server in servers))


def find_vocabulary(settings: SimWorkerSettings) -> Vocabulary:
    """Take each value from the flags, else from the model's directory, else from the defaults.

    Raises:
        ModelError: Flags and model contradict each other, or the model's files cannot be used.
    """
    vocab_size, max_model_len = settings.vocab_size, settings.max_model_len
    eos_token_ids = settings.eos_token_ids
    if settings.model is not None:
        directory = find_model(
            settings.model, settings.cache_dir, with_weights=False, with_tokenizer=False
        )
        config = read_json(directory / "config.json")
        vocab_size = vocab_size or config.positive_int("vocab_size")
        max_model_len = max_model_len or config.positive_int("max_position_embeddings")
        if not eos_token_ids:
            found = config.int_list("eos_token_id")
            generation = directory / "generation_config.json"
            if generation.exists():
                found += read_json(generation).int_list("eos_token_id")
            eos_token_ids = tuple(dict.fromkeys(found))
    vocab_size = vocab_size or _DEFAULT_VOCAB_SIZE
    for token_id in eos_token_ids:
        if not 0 <= token_id < vocab_size:
            raise ModelError(f"eos-token-ids has {token_id}; ids must be in [0, {vocab_size - 1}]")
    if len(eos_token_ids) >= vocab_size:
        raise ModelError(f"vocab-size is {vocab_size}; it must exceed the number of end tokens")
    if settings.mean_output_len is not None and not eos_token_ids:
        raise ModelError("mean-output-len is set; that needs --model or --eos-token-ids")
    return Vocabulary(vocab_size, eos_token_ids, max_model_len or _DEFAULT_MODEL_LEN)


def make_worker(settings: SimWorkerSettings, vocabulary: Vocabulary) -> WorkerService:
    """Make one worker; must be called in the worker's event loop."""
    limits = Limits(
        max_num_seqs=settings.max_num_seqs,
        max_model_len=vocabulary.max_model_len,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        num_blocks=settings.num_blocks,
        block_size=settings.block_size,
        vocab_size=vocabulary.vocab_size,
        num_host_blocks=settings.num_host_blocks,
        num_disk_blocks=settings.num_disk_blocks,
    )
    time_model = TimeModel(
        num_params=settings.params_b * 1e9,
        kv_bytes_per_token=settings.kv_bytes_per_token,
        bytes_per_s=settings.bandwidth_gb_s * 1e9,
        operations_per_s=settings.tflops * 1e12,
        swap_bytes_per_s=settings.swap_gb_s * 1e9,
        disk_bytes_per_s=settings.disk_gb_s * 1e9,
    )
    info = WorkerInfo(
        worker_id=settings.worker_id,
        device=f"simulated, {settings.bandwidth_gb_s:g} GB/s, {settings.tflops:g} TFLOPS",
        model_id=settings.model_id,
        limits=limits,
        eos_token_ids=vocabulary.eos_token_ids,
        block_bytes=settings.block_bytes,
        structured_output=settings.structured_output,
        dtype="bfloat16",
        swap_bytes_per_s=time_model.swap_bytes_per_s if limits.num_host_blocks else 0.0,
        prefill_tokens_per_s=_prefill_tokens_per_s(time_model) if limits.num_host_blocks else 0.0,
        disk_bytes_per_s=time_model.disk_bytes_per_s if limits.num_disk_blocks else 0.0,
        takes_kv=False,
        instance_id=new_instance_id(),
        max_num_blocks=settings.max_num_blocks or settings.num_blocks,
        min_num_blocks=limits.min_num_blocks,
    )
    steps = SimulatedSteps(
        limits,
        eos_token_ids=vocabulary.eos_token_ids,
        mean_output_len=settings.mean_output_len,
        time_model=time_model,
        speedup=settings.speedup,
        block_bytes=settings.block_bytes,
        script=None if settings.script is None else _script(settings.script, vocabulary),
    )
    worker = WorkerService()
    worker.open(info, steps)
    return worker


def _script(path: Path, vocabulary: Vocabulary) -> Script:
    try:
        outputs = TypeAdapter(list[list[int]]).validate_json(path.read_bytes(), strict=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"script {path} cannot be read: {error}") from None
    ids = range(vocabulary.vocab_size)
    if not outputs or not all(each in ids for output in outputs for each in output):
        raise ModelError(f"script {path} must have lists of token ids below {len(ids)}")
    if not vocabulary.eos_token_ids:
        raise ModelError("script is set; that needs --model or --eos-token-ids")
    return Script(outputs, vocabulary.eos_token_ids)


def _prefill_tokens_per_s(time_model: TimeModel) -> float:
    """Return the speed of a prompt that is alone in its step, as real workers measure it."""
    return _PREFILL_TOKENS / time_model.step_s(_PREFILL_TOKENS, _PREFILL_TOKENS)


async def _listen(settings: SimWorkerSettings, worker: WorkerService) -> Server:
    """Start a separate server for another worker, because calls do not name their worker."""
    server = make_grpc_server(settings, [worker.service()])
    address = await start_grpc_server(server, settings)
    log.info("listening", worker_id=settings.worker_id, grpc=address)
    return server
