"""`quire quantize`: quantizes a model to integers, in a separate process that needs torch."""

import subprocess
import sys
from collections.abc import Sequence

from quire.cli.settings import QuantizeSettings
from rpc.settings import parse_settings


def main(argv: Sequence[str]) -> int:
    settings = parse_settings(QuantizeSettings, "quire quantize", argv)
    flags = settings.model_dump(exclude={"model", "out"}, exclude_none=True)
    command = [sys.executable, "-P", "-m", "gpu_worker.quantize"]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    command += ["--", settings.model, str(settings.out)]
    return subprocess.run(command, check=False).returncode  # noqa: S603 - our own program
