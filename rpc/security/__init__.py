"""TLS, and who may call whom."""
