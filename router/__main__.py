"""The router's command line."""

from router.app import run_router
from router.settings import RouterSettings
from rpc.observe import instruments
from rpc.server import run
from rpc.settings import parse_settings


def main() -> None:
    """Run a router until SIGTERM or SIGINT."""
    settings = parse_settings(RouterSettings, "quire-router")
    instruments.set_up("router", settings, new_trace_ratio=settings.trace_sample_ratio)
    run(run_router(settings))


if __name__ == "__main__":
    main()
