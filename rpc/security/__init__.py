"""TLS, and checks of callers."""
