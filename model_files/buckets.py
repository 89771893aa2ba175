"""Downloads a model from object storage, by any URL that `fsspec` knows: s3://, gs://, az://."""

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from model_files.errors import ModelError

_SMALL_FILES: Final = (".json", ".jinja")
_WEIGHTS: Final = (".safetensors", ".bin", ".gguf")
_CHUNK: Final = 2**24


def download_from_bucket(
    url: str,
    cache_dir: Path,
    report: Callable[[str, float | None], None],
    *,
    with_weights: bool,
) -> Path:
    """The local copy of a directory or of a GGUF file; files of the same size are not read again.

    Raises:
        ModelError: It cannot be read, or a package that the URL's scheme needs is missing.
    """
    try:
        import fsspec  # noqa: PLC0415 - only URLs need it

        system, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise ModelError(
            f"model is {url!r}; a package is missing: {error}. Install fsspec, and s3fs for s3://"
            " or gcsfs for gs://"
        ) from error
    except ValueError as error:
        raise ModelError(f"model is {url!r}: {error}") from error
    directory = cache_dir / "urls" / hashlib.sha256(url.encode()).hexdigest()[:16]
    try:
        sizes = _sizes(system, root, with_weights=with_weights)
        directory.mkdir(parents=True, exist_ok=True)
        total, done = sum(sizes.values()), 0
        for source, size in sizes.items():
            target = directory / Path(source).name
            if not (target.exists() and target.stat().st_size == size):
                for num_bytes in _copy(system, source, target):
                    report(f"downloading {url}", (done + num_bytes) / max(1, total))
            done += size
    except Exception as error:  # each storage has its own errors
        raise ModelError(f"model is {url!r}; it cannot be downloaded: {error}") from error
    return directory / Path(root).name if root.endswith(".gguf") else directory


def _sizes(system: Any, root: str, *, with_weights: bool) -> dict[str, int]:
    """The files to take, with their sizes."""
    if root.endswith(".gguf"):
        return {root: int(system.size(root))}
    ends = _SMALL_FILES + (_WEIGHTS if with_weights else ())
    found = {
        str(entry["name"]): int(entry["size"])
        for entry in system.ls(root, detail=True)
        if entry["type"] == "file" and str(entry["name"]).endswith(ends)
    }
    if any(name.endswith(".safetensors") for name in found):
        found = {name: size for name, size in found.items() if not name.endswith(".bin")}
    if not found:
        raise FileNotFoundError("it holds no model's files")
    return found


def _copy(system: Any, source: str, target: Path) -> Any:
    """Copy a file; yields the bytes copied so far. It gets its name when it is complete."""
    num_bytes = 0
    # A name of its own: several processes may fetch the model at once.
    with tempfile.NamedTemporaryFile(
        dir=target.parent, prefix=f"{target.name}.", suffix=".partial", delete=False
    ) as writer:
        try:
            with system.open(source, "rb") as reader:
                while chunk := reader.read(_CHUNK):
                    writer.write(chunk)
                    num_bytes += len(chunk)
                    yield num_bytes
            writer.close()
            Path(writer.name).replace(target)
        finally:
            Path(writer.name).unlink(missing_ok=True)
