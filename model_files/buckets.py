"""Downloads a model from any object storage whose URLs `fsspec` knows: s3://, gs://, az://."""

import contextlib
import hashlib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from model_files.errors import ModelError
from model_files.hub import POOLING
from model_files.old_tokenizer import OTHER_TOKENIZERS, TOKENIZER

_SMALL_FILES: Final = (".json", ".jinja")
_WEIGHTS: Final = (".safetensors", ".bin", ".gguf")
_VERSION_KEYS: Final = (
    *("ETag", "etag", "md5Hash", "content_md5", "checksum"),
    *("mtime", "LastModified", "last_modified", "updated", "created"),
)
"""The names that storages give to a file's checksum, or to the time of its last change."""
_CHUNK: Final = 2**24


def download_from_bucket(
    url: str,
    cache_dir: Path,
    report: Callable[[str, float | None], None],
    *,
    with_weights: bool,
) -> Path:
    """Download what has changed of a directory or GGUF file; return the path of the local copy.

    Raises:
        ModelError: The URL cannot be read, or the package for its scheme is missing.
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
        files = _remote_files(system, root, with_weights=with_weights)
        directory.mkdir(parents=True, exist_ok=True)
        total, done = sum(file.size for file in files), 0
        for file in files:
            target = directory / file.name
            if not file.is_at(target):
                target.parent.mkdir(exist_ok=True)
                for num_bytes in _copy(system, file, target):
                    report(f"downloading {url}", (done + num_bytes) / max(1, total))
            done += file.size
    except Exception as error:  # every storage raises different errors
        raise ModelError(f"model is {url!r}; it cannot be downloaded: {error}") from error
    return directory / Path(root).name if root.endswith(".gguf") else directory


@dataclass(frozen=True, slots=True)
class _RemoteFile:
    """A file to download."""

    path: str
    name: str
    """The file's path in the model's directory."""
    size: int
    version: str
    """The file's checksum, or else the time of its last change; empty if the storage has
    neither."""

    def is_at(self, target: Path) -> bool:
        """Whether `target` is a complete copy of this `version` of the file."""
        if not target.exists() or target.stat().st_size != self.size:
            return False
        noted = _version_file(target)
        return (noted.read_text() if noted.exists() else "") == self.version


def _remote_file(entry: Mapping[str, Any], name: str | None = None) -> _RemoteFile:
    path = str(entry["name"])
    version = next((str(entry[key]) for key in _VERSION_KEYS if entry.get(key)), "")
    return _RemoteFile(path, name or Path(path).name, int(entry["size"]), version)


def _version_file(target: Path) -> Path:
    return target.with_name(f".{target.name}.version")


def _remote_files(system: Any, root: str, *, with_weights: bool) -> Sequence[_RemoteFile]:
    """Return the files to download."""
    if root.endswith(".gguf"):
        return [_remote_file(system.info(root))]
    ends = _SMALL_FILES + (_WEIGHTS if with_weights else ())
    files = [
        _remote_file(entry) for entry in system.ls(root, detail=True) if entry["type"] == "file"
    ]
    found = [file for file in files if file.path.endswith(ends)]
    if not any(file.name == TOKENIZER for file in found):
        found += [file for file in files if file.name in OTHER_TOKENIZERS and file not in found]
    if any(file.path.endswith(".safetensors") for file in found):
        found = [file for file in found if not file.path.endswith(".bin")]
    if not found:
        raise FileNotFoundError("it has no files of a model")
    if any(file.name == "modules.json" for file in found):
        with contextlib.suppress(FileNotFoundError):
            found.append(_remote_file(system.info(f"{root.rstrip('/')}/{POOLING}"), POOLING))
    return found


def _copy(system: Any, file: _RemoteFile, target: Path) -> Iterator[int]:
    """Copy a file under a temporary name, then rename it; yield the number of copied bytes."""
    num_bytes = 0
    # The name is unique, because several processes may download the model at once.
    partial = target.with_name(f"{target.name}.{uuid.uuid4().hex}.partial")
    try:
        with partial.open("xb") as writer, system.open(file.path, "rb") as reader:
            while chunk := reader.read(_CHUNK):
                writer.write(chunk)
                num_bytes += len(chunk)
                yield num_bytes
        _version_file(target).unlink(missing_ok=True)
        partial.replace(target)
        partial.write_text(file.version)
        partial.replace(_version_file(target))
    finally:
        partial.unlink(missing_ok=True)
