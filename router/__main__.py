"""The router's command line."""

from router.app import run_router
from router.settings import RouterSettings
from rpc.server import observe, run
from rpc.settings import parse_settings


def main() -> None:
    """Run a router until SIGTERM or SIGINT."""
    settings = parse_settings(RouterSettings, "quire-router")
    observe("router", settings, new_trace_ratio=settings.trace_sample_ratio)
    run(run_router(settings))


if __name__ == "__main__":
    main()
