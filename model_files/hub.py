"""Downloads a model from the Hugging Face hub into the hub's own cache.

The package `huggingface_hub` reads HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE from the
environment.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from model_files.errors import ModelError
from model_files.old_tokenizer import OTHER_TOKENIZERS, TOKENIZER

_SMALL_FILES: Final = ("*.json", "*.jinja")
_SAFETENSORS: Final = "model*.safetensors"
_PICKLES: Final = "pytorch_model*.bin"
POOLING: Final = "1_Pooling/config.json"
"""The file that describes the pooling of a sentence-transformers model. Such a model also has a
`modules.json`; if a model has no `modules.json`, the file for the pooling is not downloaded."""
_IN_FOLDERS: Final = "*/*"
"""A pattern of the files to skip: files in folders are other formats or training states."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A model on the hub."""

    given: str
    """The name as the user wrote it, for errors."""
    repository: str
    revision: str | None
    """A branch, tag or commit; None: the main branch."""
    gguf: str | None = None
    """A pattern of the GGUF files to download; None: download config.json, the weights and the
    tokenizer."""


def download_from_hub(
    name: HubName, report: Callable[[str, float | None], None], *, with_weights: bool
) -> Path:
    """Download the files of a model that the cache lacks; return the model's cache directory.

    `report` gets the status and the progress.

    Raises:
        ModelError: The hub has no such model; or the cache lacks the model, and the hub cannot be
            reached.
    """
    report(f"looking up {name.given}", None)
    if name.gguf is not None:
        directory = _download(name, report, name.gguf)
        if not any(directory.glob(name.gguf)):
            raise ModelError(f"model is {name.given!r}; {name.repository} has no such file")
        return directory
    if not with_weights:
        return _with_old_tokenizer(name, report, _download(name, report, *_SMALL_FILES))
    directory = _download(name, report, *_SMALL_FILES, _SAFETENSORS)
    if not any(directory.glob(_SAFETENSORS)):
        directory = _download(name, report, *_SMALL_FILES, _PICKLES)
    if not (directory / "config.json").exists():
        raise ModelError(
            f"model is {name.given!r}; {name.repository} has no config.json. If it has GGUF files,"
            f" name one: {name.repository}/FILE.gguf"
        )
    if (directory / "modules.json").exists():
        _download(name, report, POOLING)
    return _with_old_tokenizer(name, report, directory)


def _with_old_tokenizer(
    name: HubName, report: Callable[[str, float | None], None], directory: Path
) -> Path:
    """Download the files of `OTHER_TOKENIZERS` if there is no `TOKENIZER`; return `directory`."""
    if not (directory / TOKENIZER).exists():
        _download(name, report, *OTHER_TOKENIZERS)
    return directory


def _download(name: HubName, report: Callable[[str, float | None], None], *patterns: str) -> Path:
    # Imported here, because the import takes a second and most models are directories.
    from huggingface_hub import errors, snapshot_download  # noqa: PLC0415

    try:
        return Path(
            snapshot_download(
                name.repository,
                revision=name.revision,
                allow_patterns=list(patterns),
                ignore_patterns=None if name.gguf or POOLING in patterns else [_IN_FOLDERS],
                tqdm_class=_reporting_bar(f"downloading {name.given}", report),
            )
        )
    except errors.RevisionNotFoundError as error:
        raise ModelError(
            f"model is {name.given!r}; {name.repository} has no revision {name.revision!r}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"model is {name.given!r}; there is no such directory, and the hub has no"
            f" {name.repository}, or it needs a token that may read it (HF_TOKEN)"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise ModelError(
            f"model is {name.given!r}; there is no such directory, the hub cannot be reached, and"
            f" its cache lacks the model: {_first_line(error)} Connect this machine, or run `hf"
            f" download {name.repository}` where there is a network and give its directory as model"
        ) from error
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model is {name.given!r}; it cannot be downloaded: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _reporting_bar(status: str, report: Callable[[str, float | None], None]) -> Any:
    """Make a class of progress bars that show nothing, but report the share of downloaded bytes."""
    from tqdm import tqdm  # noqa: PLC0415 - a requirement of huggingface_hub

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "file": io.StringIO(), "disable": False})

        def display(self, *_: Any, **__: Any) -> bool:
            if self.unit == "B" and self.total:
                report(status, min(1.0, self.n / self.total))
            return True

    return Bar
