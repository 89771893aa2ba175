"""The router's command line."""

from router.app import run_router
from router.settings import RouterSettings
from rpc import logs, telemetry, timeline
from rpc.server import run
from rpc.settings import parse_settings


def main() -> None:
    """Runs a router until SIGTERM or SIGINT."""
    settings = parse_settings(RouterSettings, "quire-router")
    logs.configure(settings.log_level, settings.log_format, "router")
    telemetry.configure("quire-router", settings, new_trace_ratio=settings.trace_sample_ratio)
    timeline.configure("router", settings.timeline_dir)
    run(run_router(settings))


if __name__ == "__main__":
    main()
