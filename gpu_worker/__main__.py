"""Starts a worker: `quire-worker` or `python -m gpu_worker`."""

import os
import sys

from gpu_worker.app import StepsFailedError, run_worker
from gpu_worker.json_fields import ModelError
from gpu_worker.settings import WorkerSettings
from rpc import logs, telemetry, timeline
from rpc.server import run
from rpc.settings import parse_settings


def main() -> None:
    """Run a worker until SIGTERM or SIGINT."""
    # Between two parallel regions torch's threads would spin, and take the cores that router,
    # scheduler and clients need. Read when torch is imported, which happens later.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    settings = parse_settings(WorkerSettings, "quire-worker")
    logs.configure(settings.log_level, settings.log_format, "worker")
    telemetry.configure("quire-worker", settings)
    timeline.configure("worker", settings.timeline_dir)
    try:
        run(run_worker(settings))
    except (ModelError, StepsFailedError) as error:
        sys.stderr.write(f"quire-worker: {error}\n")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
