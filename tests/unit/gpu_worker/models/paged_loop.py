"""A small step loop for the decoders' tests: chunks, decodes, greedy tokens."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gpu_worker.kv.device_pool import KvPool
from gpu_worker.kv.layout import kv_dtypes
from gpu_worker.models.attention import AttentionMetadata, Decoder
from gpu_worker.models.registry import open_model
from gpu_worker.weights.model_config import ModelConfig
from kernels import PAD_SLOT

CPU = torch.device("cpu")


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return open_model(directory).load(dtype, CPU, lambda _: None)


def random_prompt(length: int, seed: int, vocab_size: int = 500) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()


@dataclass(eq=False)
class Sequence:
    """One sequence; it joins the batch at step `start_step`."""

    prompt: list[int]
    start_step: int = 0
    output: list[int] = field(default_factory=list)
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    """float32[V] of every position computed."""

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


class PagedLoop:
    """Runs sequences through the paged path; their blocks are scattered over the pool."""

    def __init__(
        self,
        model: Decoder,
        block_size: int,
        num_blocks: int = 128,
        num_padding: int = 0,
        config: ModelConfig | None = None,
        kv_cache_dtype: str = "auto",
        skip_layers: AbstractSet[int] = frozenset(),
    ) -> None:
        """`config` is needed only for a model that has no `config` of its own."""
        self.model = model
        dtype = torch.float32 if config is not None else model.embedding.dtype
        config = config or model.config
        dtypes = kv_dtypes(kv_cache_dtype, skip_layers, dtype, config.num_layers)
        self.pool = KvPool(config, num_blocks, block_size, dtypes, CPU)
        shuffled = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(5))
        self._free_blocks = shuffled.tolist()
        self._num_padding = num_padding
        """Padding tokens after a batch of decodes, and as many empty sequences."""

    @torch.inference_mode()
    def generate(self, sequences: list[Sequence], num_tokens: int, chunk_len: int = 16) -> None:
        """Generate `num_tokens` greedy tokens for each sequence."""
        for sequence in sequences:
            length = len(sequence.prompt) + num_tokens
            num_blocks = -(-length // self.pool.block_size)
            sequence.block_table = [self._free_blocks.pop() for _ in range(num_blocks)]
        step = 0
        while live := [s for s in sequences if len(s.output) < num_tokens]:
            started = [s for s in live if s.start_step <= step]
            if started:
                self._step(started, chunk_len)
            step += 1

    def _step(self, sequences: list[Sequence], chunk_len: int) -> None:
        lens = {s: min(chunk_len, len(s.tokens) - s.num_computed) for s in sequences}
        batch = sorted(sequences, key=lambda s: lens[s] > 1)  # decodes first
        num_decodes = sum(query_len == 1 for query_len in lens.values())
        token_ids, positions, slots = [], [], []
        for s in batch:
            new = range(s.num_computed, s.num_computed + lens[s])
            token_ids += [s.tokens[i] for i in new]
            positions += new
            size = self.pool.block_size
            slots += [s.block_table[i // size] * size + i % size for i in new]
            s.num_computed = new.stop
        query_lens, seq_lens = [lens[s] for s in batch], [s.num_computed for s in batch]
        tables = [s.block_table for s in batch]
        if num_decodes == len(batch):
            padding = self._num_padding
            token_ids, positions = token_ids + [0] * padding, positions + [0] * padding
            slots, query_lens = slots + [PAD_SLOT] * padding, query_lens + [1] * padding
            seq_lens, tables = seq_lens + [0] * padding, tables + [[]] * padding
            num_decodes += padding
        width = max(map(len, tables))
        metadata = AttentionMetadata(
            slot_mapping=torch.tensor(slots),
            block_tables=torch.tensor(
                [t + [0] * (width - len(t)) for t in tables], dtype=torch.int32
            ),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32),
            max_query_len=max(query_lens),
            num_decodes=num_decodes,
        )
        hidden = self.model.forward(
            torch.tensor(token_ids), torch.tensor(positions), self.pool, metadata
        )
        logits = self.model.logits(hidden).split(query_lens)
        for s, of_sequence in zip(batch, logits, strict=False):  # padding has no sequence
            s.logits += of_sequence
            if s.num_computed == len(s.tokens):
                s.output.append(int(of_sequence[-1].argmax()))
