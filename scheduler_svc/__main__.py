"""Starts the scheduler: `quire-scheduler` or `python -m scheduler_svc`."""

import sys

import structlog

from contract.errors import StaleEpochError
from rpc.server import observe, run
from rpc.settings import parse_settings
from scheduler_svc.app import run_scheduler
from scheduler_svc.journal.entries import RecordingError
from scheduler_svc.operations.kept_state import StateFileError
from scheduler_svc.settings import SchedulerSettings

log = structlog.get_logger()

EXIT_STALE_EPOCH = 3
"""The exit code of a scheduler from which a newer scheduler has taken the workers. Supervisors must
not restart a process that ends with this code: restarted, it would take the workers back."""


def main() -> None:
    """Run until SIGTERM or SIGINT."""
    settings = parse_settings(SchedulerSettings, "quire-scheduler")
    observe("scheduler", settings)
    try:
        run(run_scheduler(settings))
    except StaleEpochError as error:
        log.critical(
            "a newer scheduler has taken over; this one exits",
            reason=str(error),
        )
        raise SystemExit(EXIT_STALE_EPOCH) from None
    except (RecordingError, StateFileError) as error:
        sys.stderr.write(f"quire-scheduler: {error}\n")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
