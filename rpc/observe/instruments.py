"""What a process tells of itself while it runs: logs, spans, a timeline."""

from rpc.observe import logs, telemetry, timeline
from rpc.settings import ProcessSettings


def set_up(process: str, settings: ProcessSettings, *, new_trace_ratio: float = 0.0) -> None:
    """Have all tell of `process`, such as "router", as the settings say; once per process.

    `new_trace_ratio` is as `telemetry.configure` has it.
    """
    logs.configure(settings.log_level, settings.log_format, process)
    telemetry.configure(f"quire-{process}", settings, new_trace_ratio=new_trace_ratio)
    timeline.configure(process, settings.timeline_dir)
