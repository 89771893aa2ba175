"""Random tensors laid out as the worker lays them out, or worse."""

from dataclasses import dataclass

import torch

FAR = 2**30  # elements: row 2 starts past what an int32 can hold


def strided(shape, dtype, device):
    """A random tensor cut out of a wider one: dense rows, no contiguous whole."""
    wide = torch.randn(*shape[:-2], shape[-2] + 1, shape[-1] + 3, device=device).to(dtype)
    return wide[..., 1:, : shape[-1]]


def far_apart(shape, dtype, device):
    """A random tensor whose rows of dimension 0 lie FAR elements apart.

    The memory between them is never touched, so the system never provides it.
    """
    row = torch.Size(shape[1:])
    storage = torch.empty((shape[0] - 1) * FAR + row.numel(), dtype=dtype, device=device)
    inner_strides = torch.empty(row, device="meta").stride()
    rows = storage.as_strided(shape, (FAR, *inner_strides))
    rows.copy_(torch.randn(shape, device=device))
    return rows


def options(num_heads, device):
    """Attention's options, alone and together, with windows in and across tiles and splits."""
    sinks = torch.randn(num_heads, device=device) * 3
    return [
        {"window": 1},
        {"window": 37},
        {"window": 270},
        {"softcap": 1.5},
        {"sinks": sinks},
        {"window": 5, "softcap": 0.7, "sinks": sinks},
    ]


@dataclass(frozen=True)
class Paged:
    """One layer of a block-major pool, and the tables of some sequences."""

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor

    @property
    def args(self):
        return self.key_cache, self.value_cache, self.block_tables, self.seq_lens

    def dense(self, seq):
        """The keys and values of one sequence, each [seq_len, HKV, D], read slot by slot."""
        block_size = self.key_cache.shape[1]
        slots = [
            (int(self.block_tables[seq, position // block_size]), position % block_size)
            for position in range(int(self.seq_lens[seq]))
        ]
        keys = [self.key_cache[slot] for slot in slots]
        return torch.stack(keys), torch.stack([self.value_cache[slot] for slot in slots])


def make_paged(seq_lens, num_kv_heads, head_dim, block_size, dtype, device, *, max_blocks=None):
    """Sequences of these lengths in shuffled blocks of the middle one of three layers."""
    if max_blocks is None:
        max_blocks = -(-max(seq_lens) // block_size) + 1
    num_blocks = len(seq_lens) * max_blocks
    shape = (num_blocks, 3, 2, block_size, num_kv_heads, head_dim)
    pool = torch.randn(shape, device=device).to(dtype)
    tables = torch.randperm(num_blocks).view(len(seq_lens), max_blocks)
    return Paged(
        key_cache=pool[:, 1, 0],
        value_cache=pool[:, 1, 1],
        block_tables=tables.to(device, torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
    )


def dense_attention(query, key, value, scale, *, window=None, softcap=None, sinks=None):
    """Causal attention by its definition, in fp64: query [Q, H, D] are the last of the keys."""
    query_len, num_heads, _ = query.shape
    seq_len, num_kv_heads, _ = key.shape
    key = key.double().repeat_interleave(num_heads // num_kv_heads, dim=1)
    value = value.double().repeat_interleave(num_heads // num_kv_heads, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(seq_len - query_len, seq_len).unsqueeze(1) - torch.arange(seq_len)
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    weights = scores.masked_fill(hidden.to(query.device), float("-inf")).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total += sinks.double().exp().view(-1, 1, 1)
    weights = weights / total
    return torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)
