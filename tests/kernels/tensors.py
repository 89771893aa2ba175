"""Random tensors in the worker's layout, or a more difficult one."""

from dataclasses import dataclass, replace

import torch

FAR = 2**30  # elements: the offset of row 2 does not fit an int32


def strided(shape, dtype, device):
    """A random tensor cut out of a wider one: its rows are dense, but it is not contiguous."""
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
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    @property
    def args(self):
        return self.key_cache, self.value_cache, self.block_tables, self.seq_lens

    @property
    def scales(self):
        return {"key_scales": self.key_scales, "value_scales": self.value_scales}

    def dequantized(self, dtype):
        """The same, with the caches dequantized by definition."""
        sides = (self.key_cache, self.key_scales), (self.value_cache, self.value_scales)
        keys, values = (
            (numbers.double() * scales.double().unsqueeze(-1)).to(dtype)
            for numbers, scales in sides
        )
        return Paged(keys, values, self.block_tables, self.seq_lens)

    def latent(self, value_dim):
        """The same, but the values are the keys' first numbers, as in latent attention."""
        values = self.key_cache[..., :value_dim]
        return replace(self, value_cache=values, value_scales=self.key_scales)

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


def make_quantized(
    seq_lens, num_kv_heads, head_dim, block_size, stored, device, *, max_blocks=None
):
    """As `make_paged`, but of int8 or fp8, with scales of very different sizes."""
    paged = make_paged(
        seq_lens, num_kv_heads, head_dim, block_size, torch.float32, device, max_blocks=max_blocks
    )
    numbers_bytes = block_size * num_kv_heads * head_dim
    side_bytes = numbers_bytes + 2 * block_size * num_kv_heads + numbers_bytes % 2
    blocks = torch.zeros(len(paged.key_cache), 3, 2, side_bytes, dtype=torch.uint8, device=device)
    views = []
    for side, cache in enumerate((paged.key_cache, paged.value_cache)):
        numbers = blocks[:, 1, side, :numbers_bytes].view(stored).unflatten(1, cache.shape[1:])
        scales = blocks[:, 1, side, -2 * block_size * num_kv_heads :].view(torch.bfloat16)
        scales = scales.unflatten(1, cache.shape[1:3])
        largest = 127 if stored is torch.int8 else 448
        numbers.copy_((torch.rand(cache.shape, device=device) * 2 - 1) * largest)
        scales.copy_(torch.rand(scales.shape, device=device) * 1.5 / largest)
        views += [numbers, scales]
    keys, key_scales, values, value_scales = views
    return Paged(keys, values, paged.block_tables, paged.seq_lens, key_scales, value_scales)


def dense_attention(query, key, value, scale, *, window=None, softcap=None, sinks=None):
    """Causal attention by its definition, in fp64; query [Q, H, D] belongs to the last Q keys."""
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
