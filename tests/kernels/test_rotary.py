import pytest
import torch

from kernels import reference
from kernels.triton.rotary import rotary
from tests.kernels.tensors import far_apart, strided
from tests.kernels.tolerance import assert_close, every_dtype


def table(max_pos, head_dim, device="cpu"):
    inverse = 10_000.0 ** -(torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.outer(torch.arange(max_pos).float(), inverse)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)


@every_dtype
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "head_dim", "rotated"),
    [(1, 1, 1, 2, 2), (5, 6, 2, 40, 40), (3, 5, 5, 64, 64), (5, 6, 2, 40, 6), (3, 5, 5, 64, 48)],
)
def test_rotary_is_the_twin_s(
    num_tokens, num_heads, num_kv_heads, head_dim, rotated, dtype, device
):
    query = strided((num_tokens, num_heads, head_dim), dtype, device)
    key = strided((num_tokens, num_kv_heads, head_dim), dtype, device)
    positions = torch.randint(0, 300, (num_tokens,), device=device)
    args = query, key, table(300, rotated, device), positions
    for ours, twin in zip(rotary(*args), reference.rotary(*args), strict=True):
        assert ours.is_contiguous()
        assert_close(ours, twin)


@every_dtype
@pytest.mark.parametrize("rotated", [64, 48])
def test_the_twin_is_transformers_to_the_bit(rotated, dtype):
    phi3 = pytest.importorskip("transformers.models.phi3.modeling_phi3")
    config = phi3.Phi3Config(
        hidden_size=256, num_attention_heads=4, partial_rotary_factor=rotated / 64
    )
    positions = torch.tensor([0, 3, 511, 17, 2])
    query, key = torch.randn(5, 4, 64).to(dtype), torch.randn(5, 2, 64).to(dtype)
    cos, sin = phi3.Phi3RotaryEmbedding(config)(query, positions[None])
    their_query, their_key = phi3.apply_rotary_pos_emb(
        query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos, sin
    )
    wide_cos, wide_sin = phi3.Phi3RotaryEmbedding(config)(query.float(), torch.arange(512)[None])
    cos_sin = torch.cat((wide_cos[0, :, : rotated // 2], wide_sin[0, :, : rotated // 2]), dim=-1)
    our_query, our_key = reference.rotary(query, key, cos_sin, positions)
    assert torch.equal(our_query, their_query[0].transpose(0, 1))
    assert torch.equal(our_key, their_key[0].transpose(0, 1))


def test_rotary_reaches_past_int32_offsets(device):
    query = far_apart((3, 2, 16), torch.float16, device)
    args = query, query[:, :1], table(9, 16, device), torch.tensor([8, 0, 4], device=device)
    for ours, twin in zip(rotary(*args), reference.rotary(*args), strict=True):
        assert_close(ours, twin)


def test_rotary_names_the_tensor_that_does_not_fit(device):
    query, positions = torch.randn(2, 4, 16, device=device), torch.tensor([0, 1], device=device)
    with pytest.raises(ValueError, match=r"cos_sin has shape \(4, 18\); it must .* at most 16"):
        rotary(query, query, table(4, 18, device), positions)
    with pytest.raises(ValueError, match=r"positions has dtype torch\.int32"):
        rotary(query, query, table(4, 16, device), positions.int())
    odd = torch.randn(2, 4, 15, device=device)
    with pytest.raises(ValueError, match="query has head dim 15"):
        rotary(odd, odd, torch.randn(4, 15, device=device), positions)
