"""The router's command line."""

import sys

from model_files.errors import ModelError
from router.app import run_router
from router.request.audit import AuditLogError
from router.settings import RouterSettings
from rpc.server import observe, run
from rpc.settings import parse_settings


def main() -> None:
    """Run a router until SIGTERM or SIGINT."""
    settings = parse_settings(RouterSettings, "quire-router")
    observe("router", settings, new_trace_ratio=settings.trace_sample_ratio)
    try:
        run(run_router(settings))
    except (ModelError, AuditLogError) as error:
        sys.stderr.write(f"quire-router: {error}\n")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
