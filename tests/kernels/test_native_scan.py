import pytest
import torch

from kernels.cpu import ops
from kernels.reference import scan as twins
from tests.kernels.tolerance import assert_close

MAMBA = {  # heads, head dim, groups, numbers, whether `a` differs in them
    "mamba": (40, 1, 1, 16, True),
    "mamba2": (6, 5, 2, 24, False),
    "odd": (3, 2, 3, 17, True),
    "large": (48, 64, 1, 128, False),  # so that two threads share it
}
DELTA = {  # heads of queries and keys, heads of values, their dims
    "delta": (2, 4, 16, 32),
    "odd-delta": (3, 3, 9, 21),
    "large-delta": (16, 32, 64, 128),
}
SHAPES = [*MAMBA, *DELTA]


def make(shape, dtype, num_seqs, num_tokens):
    """The scan of a shape, by name; inputs by token, inputs that have none, and the states."""
    if shape in DELTA:
        num_keys, num_heads, key_dim, head_dim = DELTA[shape]
        key = torch.randn(2, num_seqs, num_tokens, num_keys, key_dim).to(dtype)
        value = torch.randn(num_seqs, num_heads, head_dim, num_tokens).to(dtype).permute(0, 3, 1, 2)
        g, beta = torch.rand(2, num_seqs, num_tokens, num_heads)
        state = torch.randn(num_seqs, num_heads, key_dim, head_dim) / 8
        return "delta_scan", (*key, value, -g, beta), (), state
    num_heads, head_dim, num_groups, width, by_number = MAMBA[shape]
    x = torch.randn(num_seqs, num_heads, head_dim, num_tokens).to(dtype).permute(0, 3, 1, 2)
    dt = torch.rand(num_seqs, num_tokens, num_heads)
    a = -torch.rand(num_heads, width if by_number else 1) * 4
    b, c = torch.randn(2, num_seqs, num_tokens, num_groups, width)
    state = torch.randn(num_seqs, num_heads, head_dim, width)
    by_token = x, dt, b.to(dtype), (c / width).to(dtype)
    return "selective_scan", by_token, (a, torch.randn(num_heads)), state


def scan(module, name, by_token, fixed, state):
    if name == "delta_scan":
        return module.delta_scan(*by_token, state)
    (x, dt, b, c), (a, d) = by_token, fixed
    return module.selective_scan(x, dt, a, b, c, d, state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_states_are_the_twin_s(shape, dtype):
    *given, state = make(shape, dtype, 2, 7)
    before = state.clone()
    for start in (state, None):
        out, after = scan(ops, *given, start)
        twin_out, twin_after = scan(twins, *given, start)
        assert_close(out, twin_out)
        assert_close(after, twin_after)
    assert torch.equal(state, before)


@pytest.mark.parametrize("module", [ops, twins], ids=["native", "twin"])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_bit_depends_on_how_tokens_are_cut_or_on_other_sequences(shape, module):
    name, by_token, fixed, state = make(shape, torch.bfloat16, 3, 11)
    whole, end = scan(module, name, by_token, fixed, state)
    for seq in range(3):
        one, now, start = slice(seq, seq + 1), state[seq : seq + 1], 0
        for stop in (1, 2, 8, 11):
            part = [each[one, start:stop] for each in by_token]
            out, now = scan(module, name, part, fixed, now)
            assert torch.equal(out, whole[one, start:stop])
            start = stop
        assert torch.equal(now, end[one])


def test_they_name_the_tensor_that_does_not_fit():
    _, (x, dt, b, c), (a, d), state = make("mamba2", torch.float32, 1, 2)
    with pytest.raises(ValueError, match=r"dt has shape"):
        ops.selective_scan(x, dt[:, :1], a, b, c, d, state)
    with pytest.raises(ValueError, match="b has 5 groups; they must divide x's 6 heads"):
        ops.selective_scan(x, dt, a, *torch.randn(2, 1, 2, 5, 24), d, state)
    _, (q, k, v, g, beta), _, state = make("delta", torch.float32, 1, 2)
    with pytest.raises(ValueError, match=r"beta has shape"):
        ops.delta_scan(q, k, v, g, beta[:, :1], state)
    with pytest.raises(ValueError, match="k has 2 heads; they must divide v's 3"):
        ops.delta_scan(q, k, v[:, :, :3], g[:, :, :3], beta[:, :, :3], state[:, :3])
