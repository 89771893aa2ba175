"""Real KV: a model computes it over the sources of Python's standard library."""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from contract.arrays import Int32Array
from contract.sampling import SamplingParams
from contract.step import NewSequence, Plan
from contract.worker_limits import Limits
from gpu_worker.kv.device_pool import KvPool
from gpu_worker.models.attention import AttentionMetadata, Decoder
from gpu_worker.models.registry import open_model
from gpu_worker.step.executor import Executor
from gpu_worker.weights.model_config import ModelConfig

BLOCK_SIZE = 16


class _Watched:
    """A model that keeps the last hidden states of all tokens."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self.hidden = torch.empty(0)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        pool: KvPool,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        wants_all = replace(metadata, wanted=None)
        self.hidden = self._model.forward(token_ids, positions, pool, wants_all)
        return metadata.select(self.hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden)


@dataclass(frozen=True, slots=True)
class Engine:
    """A model, its KV and its executor. It computes one sequence at a time, in row 0."""

    config: ModelConfig
    pool: KvPool
    executor: Executor
    model: _Watched
    limits: Limits

    def run(self, token_ids: Int32Array, first_block: int, start: int, stop: int) -> None:
        """Compute tokens [start, stop) of a sequence whose blocks begin at `first_block`."""
        blocks = np.arange(-(-len(token_ids) // BLOCK_SIZE), dtype=np.int32) + first_block
        row = NewSequence(
            seq_id=0,
            row=0,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            num_computed_tokens=start,
            block_ids=blocks,
            sampling=SamplingParams(seed=0),
            max_total_tokens=len(token_ids) + 1,
        )
        one = np.ones(1, np.int32)
        step = Plan(1, 0, new_sequences=(row,), chunk_rows=0 * one, chunk_lens=(stop - start) * one)
        self.executor.step(step)
        self.executor.reset()

    @torch.inference_mode()
    def losses(self, token_ids: Int32Array, start: int) -> torch.Tensor:
        """Return float32[N]: the last step's losses on the tokens after `start`."""
        logits = self.model.logits(self.model.hidden[:-1]).float()
        targets = torch.from_numpy(token_ids[start + 1 :].astype(np.int64)).to(logits.device)
        return torch.nn.functional.cross_entropy(logits, targets, reduction="none").cpu()


def load_engine(directory: Path, num_blocks: int, dtype: torch.dtype, device: str) -> Engine:
    """Load a model with a KV pool of `num_blocks` blocks."""
    source = open_model(directory)
    config = source.config
    where = torch.device(device)
    model = _Watched(source.load(dtype, where, lambda _: None))
    length = config.max_model_len
    limits = Limits(1, length, length, num_blocks, BLOCK_SIZE, config.vocab_size)
    pool = KvPool(config, num_blocks, BLOCK_SIZE, dtype, where)
    return Engine(config, pool, Executor(model, pool, limits, (), where), model, limits)


def texts(directory: Path, length: int, count: int) -> Iterator[Int32Array]:
    """Yield `count` texts of `length` tokens, each the beginning of a Python module."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[::5]:
        token_ids = tokenizer.encode(path.read_text(encoding="utf-8", errors="replace")).ids
        if len(token_ids) >= length:
            yield np.array(token_ids[:length], np.int32)
            count -= 1
        if not count:
            return
