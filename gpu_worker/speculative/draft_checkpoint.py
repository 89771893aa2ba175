"""Opens the small model that guesses for a model, if it can: it must speak of the same tokens."""

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from contract.limits import Limits
from gpu_worker.kv.device_pool import KvPool
from gpu_worker.kv.layout import KvDtypes, block_bytes, kv_dtypes
from gpu_worker.loading.source import open_model
from gpu_worker.models.config import ModelConfig
from gpu_worker.speculative.model import ModelDrafter
from gpu_worker.step.model_runner import Decoder
from gpu_worker.weights.json_fields import ModelError


@dataclass(frozen=True, slots=True, eq=False)
class DraftModel:
    """The small model, loaded, without room for KV yet."""

    _model: Decoder
    _config: ModelConfig
    _kv_dtypes: KvDtypes
    _device: torch.device

    def block_bytes(self, block_size: int) -> int:
        """What a block of its KV takes, besides that of the model."""
        return block_bytes(self._config, block_size, self._kv_dtypes)

    def drafter(self, num_draft_tokens: int, limits: Limits) -> ModelDrafter:
        """Make room for its KV, as many blocks as the model has, and let it guess."""
        pool = KvPool(
            self._config, limits.num_blocks, limits.block_size, self._kv_dtypes, self._device
        )
        return ModelDrafter(self._model, pool, num_draft_tokens, limits, self._device)


def load_draft_model(
    directory: Path,
    model_directory: Path,
    limits: Limits,
    dtype: torch.dtype,
    device: torch.device,
) -> DraftModel:
    """Load the small model of `directory`, to guess for that of `model_directory`.

    Raises:
        ModelError: it cannot be loaded, or its tokens or its context are not the model's.
    """
    source = open_model(directory)
    config = source.config
    if config.vocab_size != limits.vocab_size or _vocabulary(directory) != _vocabulary(
        model_directory
    ):
        raise ModelError(
            f"draft-model is {directory}; its tokens must be those of {model_directory.name}"
        )
    if config.max_model_len < limits.max_model_len:
        raise ModelError(
            f"draft-model is {directory}, which takes at most {config.max_model_len} tokens;"
            f" max-model-len is {limits.max_model_len}"
        )
    model = source.load(dtype, device, lambda _: None)
    dtypes = kv_dtypes("auto", frozenset(), dtype, config.num_layers)
    return DraftModel(model, config, dtypes, device)


def _vocabulary(directory: Path) -> dict[str, int]:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"draft-model needs tokenizer.json of both models; there is no {path}")
    vocabulary: dict[str, int] = Tokenizer.from_file(str(path)).get_vocab()
    return vocabulary
