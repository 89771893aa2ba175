"""Records logs, traces, stalls of the event loop, and a timeline to view in Perfetto."""
