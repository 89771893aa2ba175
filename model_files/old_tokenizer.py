"""Makes a directory with a tokenizer.json for a model that has its tokenizer in other files.

The directory has the tokenizer.json, and links to the model's files. `transformers` does the
conversion, in a separate process, because importing `transformers` takes seconds and much memory.
"""

import contextlib
import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from model_files.errors import ModelError

TOKENIZER: Final = "tokenizer.json"
_PROTOBUFS: Final = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_TEKKEN: Final = "tekken.json"
"""Mistral's own form of a tokenizer; Mistral's newer models may have no other form."""
OTHER_TOKENIZERS: Final = (
    *_PROTOBUFS,
    "tiktoken.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    _TEKKEN,
)
"""A model without `TOKENIZER` has one or two of these files."""
_SPECIAL: Final = "special_tokens_map.json"
_READ_TOO: Final = (*("config.json", "tokenizer_config.json", _SPECIAL, "added_tokens.json"),)
_SPECIAL_OF_TEKKEN: Final = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
"""Maps each special token's name in chat templates to the token. Every `_TEKKEN` has these tokens.
"""
_FORM: Final = "1"
"""Version of the files that this module makes; raised by hand when their form changes. The
directory's name depends on the version, so directories of an older form are not used."""
_PROGRAM: Final = """
import sys
from transformers import AutoTokenizer

try:
    tokenizer = AutoTokenizer.from_pretrained(
        sys.argv[1], local_files_only=True, trust_remote_code=False, mistral_format=False
    )
    tokenizer.backend_tokenizer.save(sys.argv[2])
except Exception as error:
    lines = str(error).split("\\n")
    sys.exit(next((line for line in lines if line), type(error).__name__))
"""


def has_tokenizer(directory: Path) -> bool:
    """Whether a model's directory has a tokenizer in any form."""
    return (directory / TOKENIZER).is_file() or has_old_tokenizer(directory)


def has_old_tokenizer(directory: Path) -> bool:
    """Whether a model's directory has a file of `OTHER_TOKENIZERS`, but no `TOKENIZER`."""
    return not (directory / TOKENIZER).is_file() and bool(_old_files(directory))


def _old_files(directory: Path) -> list[Path]:
    return [path for name in OTHER_TOKENIZERS if (path := directory / name).is_file()]


def convert_tokenizer(directory: Path, cache_dir: Path) -> Path:
    """Return a directory in `cache_dir` with the model's files and a converted tokenizer.

    Raises:
        ModelError: The tokenizer cannot be read or converted, or the cache cannot be written.
    """
    sources = _old_files(directory)
    try:
        made = cache_dir / "tokenizers" / _name_of(directory, sources)
        with _writing(cache_dir):
            made.mkdir(parents=True, exist_ok=True)
        if not (made / TOKENIZER).exists():
            _convert(directory, sources, made / TOKENIZER, cache_dir)
        # Each call makes missing links: weights may be downloaded to the hub's directory later.
        for path in directory.resolve().iterdir():
            with _writing(cache_dir), contextlib.suppress(FileExistsError):
                (made / path.name).symlink_to(path)
    except OSError as error:
        raise ModelError(
            f"{directory} has no {TOKENIZER}; to convert its tokenizer, {error.filename} is needed:"
            f" {error.strerror}"
        ) from error
    return made


def _name_of(directory: Path, sources: list[Path]) -> str:
    """Return the new directory's name, which depends on the files that the conversion reads."""
    read = [*sources, *(path for name in _READ_TOO if (path := directory / name).is_file())]
    known = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in read]
    key = json.dumps([_FORM, str(directory.resolve()), known])
    return f"{directory.resolve().name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


@contextlib.contextmanager
def _writing(cache_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"cache-dir is {cache_dir}, which cannot be written: {error.strerror}; tokenizers"
            f" converted to {TOKENIZER} are stored there"
        ) from error


def _convert(directory: Path, sources: list[Path], target: Path, cache_dir: Path) -> None:
    names = " and ".join(path.name for path in sources)
    needed = {"transformers", *(_package_of(path) for path in sources)} - {None}
    missing = [name for name in sorted(map(str, needed)) if not importlib.util.find_spec(name)]
    if missing:
        raise ModelError(
            f"{directory} has no {TOKENIZER}; to convert {names}, run"
            f" `pip install {' '.join(missing)}`"
        )
    with contextlib.ExitStack() as stack:
        with _writing(cache_dir):
            made_in = stack.enter_context(tempfile.TemporaryDirectory(dir=target.parent))
        made = Path(made_in) / TOKENIZER
        done = subprocess.run(  # noqa: S603 - the program is ours
            [sys.executable, "-P", "-c", _PROGRAM, str(directory), str(made)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            lines = done.stderr.strip().split("\n")
            # After this warning, `transformers` tries to read another kind of file, and the error
            # of that attempt misleads.
            reason = next((line for line in lines if "Could not extract" in line), lines[-1])
            raise ModelError(f"{directory}: {names} cannot be converted to {TOKENIZER}: {reason}")
        with _writing(cache_dir):
            if (directory / _TEKKEN) in sources and not (directory / _SPECIAL).exists():
                special = made.with_name(_SPECIAL)
                special.write_text(json.dumps(_SPECIAL_OF_TEKKEN))
                special.replace(target.with_name(_SPECIAL))
            made.replace(target)


def _package_of(path: Path) -> str | None:
    """Return the package that `transformers` needs to read a file; None: it needs no package."""
    if path.suffix != ".model":
        return None
    with path.open("rb") as file:
        is_protobuf = file.read(1) == b"\n"  # else lines of text
    return "sentencepiece" if is_protobuf else "tiktoken"
