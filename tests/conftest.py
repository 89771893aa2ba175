"""Settings before any test module is imported: Hypothesis, and Triton's interpreter."""

import os
import shutil
import signal

from hypothesis import HealthCheck, Phase, settings

# A shell that starts the tests in the background ignores SIGINT, and every child would inherit
# that.
signal.signal(signal.SIGINT, signal.default_int_handler)

if shutil.which("nvidia-smi") is None:  # transformers imports triton, which reads the variable
    os.environ.setdefault("TRITON_INTERPRET", "1")

_ANY_SPEED = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "short",
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=_ANY_SPEED,
)
settings.register_profile(
    "long",
    max_examples=20_000,
    stateful_step_count=100,
    deadline=None,
    print_blob=True,
    suppress_health_check=_ANY_SPEED,
)
settings.register_profile(  # only whether a test fails matters
    "mutation", parent=settings.get_profile("short"), phases=[Phase.explicit, Phase.generate]
)
settings.load_profile("short")
