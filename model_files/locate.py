"""Finds the directory of a model's files by the name that the user gives."""

import re
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Final, TypeAlias

from model_files.buckets import download_from_bucket
from model_files.errors import ModelError
from model_files.gguf_directory import lay_out
from model_files.hub import HubName, download_from_hub
from model_files.old_tokenizer import convert_tokenizer, has_old_tokenizer

Report: TypeAlias = Callable[[str, float | None], None]
"""A callback that gets a status and the progress in [0, 1]; None: the progress is unknown. An error
that the callback raises ends `find_model`."""

DEFAULT_CACHE_DIR: Final = Path("~/.cache/quire")

_HUB_NAME: Final = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:/([\w./-]+\.gguf))?(?:@([\w./-]+))?")
_PART_NUMBER: Final = re.compile(r"-\d{5}-of-")


class ModelPlace(Enum):
    """Where a model's files are."""

    DIRECTORY = "directory"
    GGUF = "GGUF file"
    HUB = "hub"
    URL = "URL"


def place_of(model: str) -> ModelPlace:
    """Return whether `model` names a directory, a GGUF file, a model on the hub or a URL.

    An existing directory or file takes precedence over a name on the hub.

    Raises:
        ModelError: `model` is no such directory or file, no URL, and no possible name on the hub.
    """
    path = Path(model)
    if path.is_dir():
        return ModelPlace.DIRECTORY
    if path.is_file():
        if path.suffix == ".gguf":
            return ModelPlace.GGUF
        raise ModelError(f"model is {model!r}, a file; only .gguf files can be served")
    if "://" in model:
        return ModelPlace.URL
    if _HUB_NAME.fullmatch(model):
        return ModelPlace.HUB
    raise ModelError(
        f"model is {model!r}: there is no such directory or GGUF file, and a name on the hub is"
        " ORG/NAME"
    )


def name_of(model: str) -> str:
    """Return the model's default name in requests: that of its directory, file or repository."""
    try:
        place = place_of(model)
    except ModelError:  # reading the model will fail with a clear error
        return Path(model).name
    path = Path(model).resolve()
    if place is ModelPlace.HUB:
        repository, file, _ = _parsed(model)
        if file is None:
            return repository
        path = Path(file)
    return path.stem if path.suffix == ".gguf" else path.name


def find_model(
    model: str,
    cache_dir: Path,
    report: Report = lambda _status, _progress: None,
    *,
    with_weights: bool = True,
    with_tokenizer: bool = True,
) -> Path:
    """Find the directory of a model's files; download the files if necessary.

    Args:
        model: A directory; a GGUF file; ORG/NAME, ORG/NAME@REVISION or ORG/NAME/FILE.gguf on the
            hub; or a URL such as s3://BUCKET/DIRECTORY.
        cache_dir: Directory for files that are downloaded from URLs, or made from a GGUF file, and
            for converted tokenizers. Files from the hub have a separate cache.
        report: Called with the progress of a download.
        with_weights: Whether the caller reads weights. If not, only small files are downloaded; a
            GGUF file is always downloaded whole.
        with_tokenizer: Whether the caller reads the tokenizer. If so, and if the model has no
            tokenizer.json, this file is made from the model's older tokenizer files.

    Raises:
        ModelError: There is no such model, or it cannot be downloaded. The message says what to do.
    """
    path, place = Path(model), place_of(model)
    if place is ModelPlace.DIRECTORY and not (with_tokenizer and has_old_tokenizer(path)):
        return path
    try:
        cache_dir = cache_dir.expanduser()
    except RuntimeError as error:
        raise ModelError(f"cache-dir is {cache_dir}; this user has no home directory") from error
    if place is ModelPlace.URL:
        path = download_from_bucket(model, cache_dir, report, with_weights=with_weights)
    elif place is ModelPlace.HUB:
        repository, file, revision = _parsed(model)
        pattern = None if file is None else _PART_NUMBER.sub("-*-of-", file)
        name = HubName(model, repository, revision, pattern)
        path = download_from_hub(name, report, with_weights=with_weights) / (file or "")
    if not path.is_dir():
        return lay_out(path, cache_dir)
    if with_tokenizer and has_old_tokenizer(path):
        return convert_tokenizer(path, cache_dir)
    return path


def _parsed(model: str) -> tuple[str, str | None, str | None]:
    """Return repository, GGUF file and revision of a name on the hub."""
    match = _HUB_NAME.fullmatch(model)
    assert match is not None, "it is a name on the hub"
    repository, file, revision = match.groups()
    return repository, file, revision
