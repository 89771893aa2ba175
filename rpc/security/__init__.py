"""TLS, and who may call which process."""
