"""Starts a worker: `quire-worker` or `python -m gpu_worker`."""

import sys

from gpu_worker.app import StepsFailedError, run_worker
from gpu_worker.parallel.member import Member
from gpu_worker.rank_process import prepare_environment, run_rank
from gpu_worker.settings import WorkerSettings
from gpu_worker.weights.json_fields import ModelError
from rpc.server import observe, run
from rpc.settings import parse_settings


def main() -> None:
    """Run a worker until SIGTERM or SIGINT."""
    settings = parse_settings(WorkerSettings, "quire-worker")
    prepare_environment(settings.master_addr)  # before torch is imported
    if settings.rank:
        run_rank(Member(settings))
    observe("worker", settings)
    try:
        run(run_worker(settings))
    except (ModelError, StepsFailedError) as error:
        sys.stderr.write(f"quire-worker: {error}\n")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
