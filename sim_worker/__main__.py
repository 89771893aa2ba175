"""Starts simulated workers: `quire-sim-worker` or `python -m sim_worker`."""

import sys

from gpu_worker.weights.json_fields import ModelError
from rpc.server import observe, run
from rpc.settings import parse_settings
from sim_worker.app import run_sim_workers
from sim_worker.settings import SimWorkerSettings


def main() -> None:
    """Run until SIGTERM or SIGINT."""
    settings = parse_settings(SimWorkerSettings, "quire-sim-worker")
    observe("sim-worker", settings)
    try:
        run(run_sim_workers(settings))
    except ModelError as error:
        sys.stderr.write(f"quire-sim-worker: {error}\n")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
