"""Compares one stream's speed with another server's, on model shapes for which no code was tuned.

    python bench/shapes.py --peer-command 'vllm serve {model} --port {port} --dtype bfloat16'

Writes a Llama of each shape with random weights, starts Quire and the peer on it, and lets them
take turns. The ratio of output tokens/s is taken within a round; the median of the rounds is
printed, and its goal is 1.3. The peer is any OpenAI-shaped server that answers /health. A shell
runs its command, in which `{model}` stands for the model's directory and `{port}` for the port.
"""

import argparse
import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from harness.case import Results, Table, arguments, main, progress
from harness.closed_loop import Workload, median_of
from harness.processes import Process, free_ports, service
from make_model import Sizes, make_model
from serve import Peer, Rounds, measure_loads

SHAPES = {
    "576": Sizes(576, 16, 9, 3, 1536, 32_003),
    "576-tied": Sizes(576, 16, 9, 3, 1536, 262_144, is_tied=True),
    "896": Sizes(896, 12, 14, 2, 4864, 32_003),
    "896-tied": Sizes(896, 12, 14, 2, 4864, 262_144, is_tied=True),
    "1024": Sizes(1024, 12, 16, 8, 3072, 262_144),
    "1024-tied": Sizes(1024, 12, 16, 8, 3072, 32_003, is_tied=True),
    "1152": Sizes(1152, 10, 9, 3, 3072, 32_003),
    "1152-tied": Sizes(1152, 10, 18, 6, 4608, 262_144, is_tied=True),
    "2048": Sizes(2048, 6, 32, 8, 5632, 32_003),
    "2048-tied": Sizes(2048, 6, 16, 2, 5632, 32_003, is_tied=True),
}
"""The shapes by hidden size, each with tied and with untied embeddings."""
_IN_SHELL = (  # without the path of our packages: one has the name of a package that vLLM uses
    "import os, sys; del os.environ['PYTHONPATH']; os.execv('/bin/sh', ['sh', '-c', sys.argv[1]])"
)


async def measure(given: argparse.Namespace) -> Results:
    shape_to_rounds = {}
    for name in given.shapes:
        with tempfile.TemporaryDirectory(prefix="quire-bench-shape-") as directory:
            model = Path(directory) / "model"
            progress(f"{name}: writing {SHAPES[name]} …")
            await asyncio.to_thread(make_model, model, SHAPES[name])
            shape_to_rounds[name] = await _measure_model(given, model)
    print("\nmedians at one stream:")
    table = Table("shape:<9", "ours tok/s:.1f", "peer's:.1f", "ratio:.3f", "least:.3f", "most:.3f")
    metrics = {}
    for name, rounds in shape_to_rounds.items():
        cells = [median_of(rounds.ours).output_tok_s]
        for peer, results in rounds.peers.items():
            ratio = rounds.ratios(peer)["peer_ratio_c1"]
            cells += [median_of(results).output_tok_s, ratio.median, ratio.least, ratio.greatest]
        table.row(name, *cells)
        metrics |= {f"{each}_{name}": value for each, value in rounds.metrics().items()}
    return metrics


async def _measure_model(given: argparse.Namespace, model: Path) -> Rounds:
    """Measure one stream to a service of the model, and to the peer if there is one."""
    flags = ("--num-threads", str(given.num_threads), "--kv-cache-memory-gb", "0.5")
    workload = Workload("", 1 if given.quick else 4, input_len=128, output_len=64)
    async with contextlib.AsyncExitStack() as stack:
        ours = await stack.enter_async_context(service(model, flags))
        peer = await stack.enter_async_context(peer_server(given.peer_command, model))
        await ours.wait_until_ready()
        peers = [] if peer is None else [Peer("", peer)]
        (rounds,) = await measure_loads(ours.base_url, peers, {1: workload}, given.rounds)
    return rounds


@contextlib.asynccontextmanager
async def peer_server(command: str | None, model: Path) -> AsyncIterator[str | None]:
    """Start the command's server and yield its address when it is ready; None without a command."""
    if command is None:
        yield None
        return
    (port,) = free_ports(1)
    command = command.replace("{model}", str(model)).replace("{port}", str(port))
    log = model.parent / "peer.log"
    peer = Process("the peer", ("-c", _IN_SHELL, command), log, port, ready_path="/health")
    progress(f"starting {command} …")
    peer.start()
    try:
        await peer.wait_until_ready()
        yield peer.base_url
    finally:
        await peer.stop()


def _shapes(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in SHAPES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]}: must be one of {', '.join(SHAPES)}")
    return names


def _parse() -> argparse.Namespace:
    parser = arguments(__doc__, quick="one prompt in each turn, one round")
    add = parser.add_argument
    add("--peer-command", metavar="CMD", help="starts the server to compare with")
    add("--shapes", type=_shapes, default=",".join(SHAPES), help="such as 576,896-tied")
    add("--num-threads", type=int, default=2, help="threads of our worker")
    add("--rounds", type=int, help="turns of both per shape; default: 3, or 1 with --quick")
    given = parser.parse_args()
    given.rounds = given.rounds or (1 if given.quick else 3)
    return given


if __name__ == "__main__":
    main(_parse(), measure)
    progress("done")
