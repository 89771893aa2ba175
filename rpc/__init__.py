"""What every process shares: server, channel, errors, telemetry, settings, logs."""
