"""Reads which tasks a model supports, and how it pools embeddings by default."""

import json
from pathlib import Path
from typing import Final

from contract.pooling import Abilities, Pooling, PoolingKind, Task
from gpu_worker.weights.json_fields import JsonFields, read_json
from gpu_worker.weights.model_config import ModelConfig

_SIZE_FIELDS: Final = ("hidden_size", "n_embd", "d_model")
_MODES: Final = {
    "pooling_mode_cls_token": PoolingKind.CLS,
    "pooling_mode_mean_tokens": PoolingKind.MEAN,
    "pooling_mode_lasttoken": PoolingKind.LAST,
}
"""Maps a field of sentence-transformers' `1_Pooling/config.json` to the kind of pooling that the
field selects."""
_MODULES: Final = ("Transformer", "Pooling", "Normalize")


def read_abilities(directory: Path, config: ModelConfig, num_ranks: int) -> Abilities:
    """Find out which tasks the model in a directory can do.

    Raises:
        ModelError: A file of sentence-transformers in the directory asks for something unsupported.
    """
    fields = read_json(directory / "config.json")
    size = next((fields.positive_int(name) for name in _SIZE_FIELDS if fields.has(name)), 0)
    if config.is_encoder:
        if config.architecture.endswith("ForSequenceClassification"):
            return Abilities((Task.SCORE,))
        pooling = _read_pooling(directory, Pooling(PoolingKind.MEAN, normalize=True))
        return Abilities((Task.EMBED,), size, pooling)
    if num_ranks > 1 or not size:
        return Abilities()
    pooling = _read_pooling(directory, Pooling(PoolingKind.LAST, normalize=True))
    return Abilities((Task.GENERATE, Task.EMBED), size, pooling)


def _read_pooling(directory: Path, default: Pooling) -> Pooling:
    """Read the pooling from sentence-transformers' files; without such files, return `default`."""
    path = directory / "modules.json"
    if not path.is_file():
        return default
    modules = [
        JsonFields(path, f"[{i}].", values) for i, values in enumerate(json.loads(path.read_text()))
    ]
    names = [str(module.get("type")).rpartition(".")[2] for module in modules]
    for module, name in zip(modules, names, strict=True):
        if name not in _MODULES:
            raise module.error("type", f"is {name}; supported: {', '.join(_MODULES)}")
    kind = default.kind
    if "Pooling" in names:
        pooling = read_json(
            directory / str(modules[names.index("Pooling")].get("path")) / "config.json"
        )
        given = [name for name, value in pooling.values.items() if value is True]
        given = [name for name in given if name.startswith("pooling_mode_")]
        if len(given) != 1 or given[0] not in _MODES:
            raise pooling.error(
                "pooling_mode_*",
                f"selects {', '.join(given) or 'nothing'}; it must select one of"
                f" {', '.join(_MODES)}",
            )
        kind = _MODES[given[0]]
    return Pooling(kind, normalize="Normalize" in names)
