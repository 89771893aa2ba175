"""The files of a model's tokenizer as a ZIP archive, for a gateway that tokenizes itself."""

import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from quire.vllm_engine import smg_common_pb2

_CHUNK_BYTES: Final = 64 * 1024
_NAMES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "chat_template.json",
    "*.jinja",
)
"""The files that define tokens, the chat template and the end of outputs."""


def read_tokenizer_files(directory: Path) -> bytes:
    """Return a ZIP archive of the tokenizer's files in `directory`."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as files:
        for name in _NAMES:
            for path in sorted(directory.glob(name)):
                files.write(path, path.name)
    return archive.getvalue()


def chunks_to_proto(archive: bytes) -> Iterator[smg_common_pb2.GetTokenizerChunk]:
    """Split an archive into messages; the last message has the archive's hash."""
    digest = hashlib.sha256(archive).hexdigest()
    for start in range(0, len(archive), _CHUNK_BYTES):
        is_last = start + _CHUNK_BYTES >= len(archive)
        yield smg_common_pb2.GetTokenizerChunk(
            data=archive[start : start + _CHUNK_BYTES], sha256=digest if is_last else ""
        )
