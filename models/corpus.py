"""The training text: the Python standard library of the running interpreter, as token arrays.

The corpus has three streams of documents, each document between `BOS` and `EOS`:

- `library`: the modules themselves, cut at some top-level definitions, so that a prompt may begin
  with a function instead of the start of a file;
- `tests`: the library's own tests, cut in the same way;
- `functions`: single functions and methods, moved to the left margin, with the first paragraph of
  their docstring as a comment above them. The chat template gives conversations the same form.
"""

import ast
import hashlib
import json
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS: Final = "<|begin|>"
EOS: Final = "<|end|>"
STREAMS: Final = ("library", "tests", "functions")

# Runs of spaces are tokens of their own, so that a prompt may end after an indentation.
SPLIT: Final = r" {2,}|\n+|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
TEST_FOLDERS: Final = frozenset({"test", "tests", "idle_test"})
# Folders of generated tables, or of Python that is no useful example.
SKIPPED_FOLDERS: Final = frozenset(
    {"site-packages", "__pycache__", "encodings", "pydoc_data", "data"}
)
CUT_PROBABILITY: Final = 0.3
HELD_OUT_ONE_IN: Final = 60
FUNCTION_LINES: Final = range(3, 60)


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token ids by stream, uint16: one part for training, one held out for validation."""

    train: dict[str, NDArray[np.uint16]]
    held_out: dict[str, NDArray[np.uint16]]
    num_bytes_per_token: float


@dataclass(frozen=True, slots=True)
class LibraryFile:
    """A file of the library."""

    text: str
    is_test: bool
    is_held_out: bool


def load_corpus(folder: Path, vocab_size: int) -> tuple[Corpus, Tokenizer]:
    """Reads the corpus kept in `folder`, or builds it there."""
    tokenizer_file = folder / "tokenizer.json"
    arrays_file = folder / "tokens.npz"
    facts_file = folder / "corpus.json"
    if not facts_file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        train, held_out = _read_documents()
        tokenizer = _train_tokenizer([*train["library"], *train["functions"]], vocab_size)
        tokenizer.save(str(tokenizer_file))
        arrays = {}
        for part, streams in (("train", train), ("held_out", held_out)):
            for name, documents in streams.items():
                arrays[f"{part}.{name}"] = _encode(tokenizer, documents)
        np.savez(arrays_file, **arrays)
        num_bytes = sum(len(d.encode()) for d in train["library"])
        facts_file.write_text(
            json.dumps({"num_bytes_per_token": num_bytes / len(arrays["train.library"])})
        )
    loaded = np.load(arrays_file)
    return Corpus(
        train={name: loaded[f"train.{name}"] for name in STREAMS},
        held_out={name: loaded[f"held_out.{name}"] for name in STREAMS},
        num_bytes_per_token=json.loads(facts_file.read_text())["num_bytes_per_token"],
    ), Tokenizer.from_file(str(tokenizer_file))


def _read_documents() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    train: dict[str, list[str]] = {name: [] for name in STREAMS}
    held_out: dict[str, list[str]] = {name: [] for name in STREAMS}
    rng = random.Random(0)  # noqa: S311 - where to cut documents, no secret
    for source in read_sources():
        streams = held_out if source.is_held_out else train
        streams["tests" if source.is_test else "library"].extend(_cut(source.text, rng))
        if not source.is_test:
            streams["functions"].extend(_functions(source.text))
    for documents in train.values():
        rng.shuffle(documents)
    return train, held_out


def read_sources() -> Iterator[LibraryFile]:
    """The files for training, in the order of their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if SKIPPED_FOLDERS.intersection(parts) or parts[-1].startswith("_sysconfigdata"):
            continue
        text = _read_source(path)
        if text is None:
            continue
        digest = hashlib.sha256("/".join(parts).encode()).digest()
        yield LibraryFile(
            text=text,
            is_test=bool(TEST_FOLDERS.intersection(parts)),
            is_held_out=digest[0] % HELD_OUT_ONE_IN == 0,
        )


def _read_source(path: Path) -> str | None:
    """The text of a file if it is suitable for training, else None."""
    try:
        text = path.read_text(encoding="utf-8").replace("\t", "    ").strip() + "\n"
        ast.parse(text)
    except (UnicodeDecodeError, SyntaxError, ValueError):
        return None
    lines = text.splitlines()
    is_prose_or_data = len(text) > 60 * len(lines) or max(map(len, lines)) > 1000
    is_foreign = sum(not c.isascii() for c in text) > len(text) / 100
    return None if is_prose_or_data or is_foreign else text


def _cut(text: str, rng: random.Random) -> Iterator[str]:
    lines = text.splitlines(keepends=True)
    start = 0
    for node in ast.parse(text).body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
        if first > start and rng.random() < CUT_PROBABILITY:
            yield "".join(lines[start:first]).rstrip() + "\n"
            start = first
    yield "".join(lines[start:]).rstrip() + "\n"


def _functions(text: str) -> Iterator[str]:
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        documentation = ast.get_docstring(node)
        if not documentation or len(node.body) == 1 or node.end_lineno is None:
            continue
        doc_node = node.body[0]
        head, body = lines[node.lineno - 1 : doc_node.lineno - 1], lines[doc_node.end_lineno :]
        body = body[: node.end_lineno - (doc_node.end_lineno or 0)]
        if not head or len(head) + len(body) not in FUNCTION_LINES:
            continue
        while body and not body[0].strip():
            body = body[1:]
        comment = documentation.strip().split("\n\n")[0].splitlines()
        source = textwrap.dedent("\n".join([*head, *body]))
        yield "".join(f"# {line.strip()}\n" for line in comment) + source.rstrip() + "\n"


def _train_tokenizer(documents: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return tokenizer


def _encode(tokenizer: Tokenizer, documents: list[str]) -> NDArray[np.uint16]:
    end = tokenizer.token_to_id(EOS)
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(documents):
        ids.extend(encoding.ids)
        ids.append(end)
    return np.asarray(ids, dtype=np.uint16)
