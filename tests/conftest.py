"""Hypothesis profiles."""

from hypothesis import HealthCheck, settings

_ANY_SPEED = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "short",
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=_ANY_SPEED,
)
settings.register_profile(
    "long",
    max_examples=20_000,
    stateful_step_count=60,
    deadline=None,
    print_blob=True,
    suppress_health_check=_ANY_SPEED,
)
settings.load_profile("short")
