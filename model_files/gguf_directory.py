"""Makes a Hugging Face directory for a GGUF file, so that every process can read the model.

The directory has JSON files, made from the GGUF file's metadata, and a link to the GGUF file. The
worker reads the tensors through the link.
"""

import hashlib
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

from model_files.errors import ModelError
from model_files.gguf_config import end_tokens, to_config
from model_files.gguf_header import GgufHeader, read_header
from model_files.gguf_tokenizer import to_tokenizer, to_tokenizer_config

_FORM: Final = "1"
"""Version of the files that this module makes; raised by hand when their form changes. The
directory's name depends on the version, so directories of an older form are not used."""
_PART: Final = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def lay_out(path: Path, cache_dir: Path) -> Path:
    """Return the Hugging Face directory for a GGUF file; make it unless `cache_dir` has it.

    Args:
        path: The file; any of the files if the model has several.
        cache_dir: The cache, which is created if it is missing.

    Raises:
        ModelError: The file cannot be read or needs something unsupported, or the cache cannot be
            written.
    """
    parts = parts_of(path)
    known = [(str(part), part.stat().st_size, part.stat().st_mtime_ns) for part in parts]
    digest = hashlib.sha256(json.dumps([_FORM, known]).encode()).hexdigest()[:16]
    directory = cache_dir / "gguf" / f"{path.stem}-{digest}"
    if directory.is_dir():
        return directory
    header = read_header(parts[0])
    for part in parts[1:]:
        header.tensors.update(read_header(part).tensors)
    files = _files(header)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent) as made_in:
            made = Path(made_in) / "made"
            made.mkdir()
            for name, text in files.items():
                (made / name).write_text(text, encoding="utf-8")
            for number, part in enumerate(parts):
                (made / f"model-{number:05}.gguf").symlink_to(part)
            _move(made, directory)
    except OSError as error:
        raise ModelError(
            f"cache-dir is {cache_dir}, which cannot be written: {error.strerror}; the files made"
            " from a GGUF file's metadata are stored there"
        ) from error
    return directory


def parts_of(path: Path) -> list[Path]:
    """Return all files of the model that `path` belongs to, in order.

    Raises:
        ModelError: One of the files is missing.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path.resolve()]
    stem, _, count = match.groups()
    parts = [path.with_name(f"{stem}-{i:05}-of-{count}.gguf") for i in range(1, int(count) + 1)]
    for part in parts:
        if not part.is_file():
            raise ModelError(f"{path} is one of {int(count)} files; there is no {part}")
    # Follow links last, because the hub's cache links each file to a blob, whose name has no
    # number.
    return [part.resolve() for part in parts]


def _files(header: GgufHeader) -> dict[str, str]:
    def as_text(fields: dict[str, Any]) -> str:
        return json.dumps(fields, indent=2) + "\n"

    return {
        "config.json": as_text(to_config(header)),
        "generation_config.json": as_text({"eos_token_id": end_tokens(header)}),
        "tokenizer.json": to_tokenizer(header).to_str(),
        "tokenizer_config.json": as_text(to_tokenizer_config(header)),
    }


def _move(made: Path, directory: Path) -> None:
    """Rename `made` to `directory`; delete `made` if another process has made `directory` first."""
    try:
        made.rename(directory)
    except OSError:
        if not directory.is_dir():
            raise
        shutil.rmtree(made)
