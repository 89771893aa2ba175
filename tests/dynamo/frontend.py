"""Dynamo's frontend without etcd and NATS; Dynamo's Python runs this."""

import asyncio
import sys

from dynamo.llm import EngineType, EntrypointArgs, make_engine, run_input
from dynamo.runtime import DistributedRuntime


async def main(port: int) -> None:
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    options = EntrypointArgs(
        EngineType.Dynamic,
        http_host="127.0.0.1",
        http_port=port,
        migration_limit=3,  # retries at another cell what a cell without a scheduler refuses
    )
    await run_input(runtime, "http", await make_engine(runtime, options))


asyncio.run(main(int(sys.argv[1])))
