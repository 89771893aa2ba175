"""Code that every process uses: server, channels, errors, telemetry, settings and logs."""
