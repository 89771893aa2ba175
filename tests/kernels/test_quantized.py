"""Quantized caches: stored numbers are as defined, and attention uses the stored numbers."""

import pytest
import torch

from kernels import PAD_SLOT, ops, reference
from kernels.reference.quantized_kv import dequantize
from kernels.triton.attention.decode import paged_attention_decode
from kernels.triton.attention.prefill import paged_attention_prefill
from kernels.triton.store import store_kv
from tests.kernels.tensors import FAR, dense_attention, make_quantized, options, strided
from tests.kernels.tolerance import assert_close, every_dot_dtype, every_dtype

every_stored = pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
every_store = pytest.mark.parametrize(
    "store",
    [
        pytest.param(store_kv, id="triton"),
        pytest.param(
            ops.store_kv,
            id="native",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="it stores on a CPU"),
        ),
        pytest.param(reference.store_kv, id="twin"),
    ],
)

SHAPES = [(2, 2, 16, 4), (6, 2, 40, 5), (16, 1, 64, 16), (3, 3, 7, 3)]  # H, HKV, D, P
SHAPE_NAMES = ("num_heads", "num_kv_heads", "head_dim", "block_size")
CHUNKS = [(33, 33), (0, 0), (1, 70), (65, 65), (7, 23), (20, 150)]  # (query_len, seq_len)
LARGEST = {torch.int8: 127, torch.float8_e4m3fn: 448}


def starts_of(query_lens, device):
    return torch.tensor([0, *query_lens], device=device).cumsum(0).to(torch.int32)


def empty(num_blocks, num_kv_heads, head_dim, block_size, stored, device):
    """Blocks without contents, of one sequence."""
    paged = make_quantized(
        [num_blocks * block_size],
        *(num_kv_heads, head_dim, block_size, stored, device),
        max_blocks=num_blocks,
    )
    for view in (paged.key_cache, paged.value_cache, paged.key_scales, paged.value_scales):
        view.zero_()
    return paged


def bits(paged):
    """All stored numbers as integers, so that -0 differs from 0."""
    numbers = [cache.view(torch.uint8) for cache in (paged.key_cache, paged.value_cache)]
    scales = [scales.view(torch.int16) for scales in (paged.key_scales, paged.value_scales)]
    return numbers + scales


def rows(num_tokens, num_kv_heads, head_dim, dtype, device):
    """Rows of numbers from tiny to huge, and a row of zeros."""
    x = strided((num_tokens, num_kv_heads, head_dim), dtype, device)
    sizes = torch.linspace(-6, 6, num_tokens, device=device).exp2().view(-1, 1, 1)
    x = x.mul_(sizes.to(dtype))
    x[0, 0] = 0
    return x


@every_stored
@every_dtype
@pytest.mark.parametrize("shape", [(1, 1, 16), (7, 3, 40), (29, 2, 64), (5, 3, 7)])
def test_store_writes_the_twin_s_bits(shape, dtype, stored, device):
    num_tokens, num_kv_heads, head_dim = shape
    key, value = (rows(*shape, dtype, device) for _ in range(2))
    slots = torch.randperm(6 * 5)[:num_tokens].to(device)
    paged, twin = (empty(6, num_kv_heads, head_dim, 5, stored, device) for _ in range(2))
    store_kv(key, value, paged.key_cache, paged.value_cache, slots, **paged.scales)
    reference.store_kv(key, value, twin.key_cache, twin.value_cache, slots, **twin.scales)
    for ours, theirs in zip(bits(paged), bits(twin), strict=True):
        assert torch.equal(ours, theirs)


@every_stored
@every_store
def test_every_number_is_stored_as_the_nearest(store, stored, device):
    """The row begins with the largest number, so that its scale is 1."""
    x = torch.randn(64, 1, 64, device=device) * torch.logspace(-4, 2, 64, device=device)
    x[:4, 0, 1:] = (torch.arange(4 * 63) / 2.0).reshape(4, 63).clamp(max=126.5)  # ties of int8
    # Ties of fp8: halfway between two of its numbers.
    numbers = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halfway = ((numbers[1:] + numbers[:-1]) / 2).to(device)
    x[4:6, 0, 1:] = halfway.reshape(2, 63)
    x = x.clamp(-LARGEST[stored], LARGEST[stored])
    x[:, :, 0] = LARGEST[stored]
    paged = empty(16, 1, 64, 4, stored, device)
    slots = torch.arange(64, device=device)
    store(x, -x, paged.key_cache, paged.value_cache, slots, **paged.scales)
    expected = (x.round() if stored is torch.int8 else x).to(stored).float()
    assert (paged.key_scales == 1).all()
    assert torch.equal(paged.key_cache.flatten(0, 1).float(), expected)
    assert torch.equal(paged.value_cache.flatten(0, 1).float(), -expected)


@every_stored
@every_dtype
@pytest.mark.parametrize("scale", [1.0, 0.0123, 3e-38, 7.7])
def test_the_twin_reads_every_number_times_its_scale(scale, dtype, stored, device):
    numbers = torch.arange(256, device=device).to(torch.uint8).view(stored)
    numbers = numbers[numbers.float().isfinite()]
    scale = torch.tensor(scale, device=device).bfloat16()
    expected = (numbers.double() * scale.double()).to(dtype)
    assert torch.equal(dequantize(numbers, scale, dtype), expected)


@every_stored
@every_store
def test_what_is_stored_is_as_near_as_the_formats_promise(store, stored, device):
    x = rows(60, 2, 33, torch.float32, device)
    paged = empty(15, 2, 33, 4, stored, device)
    slots = torch.arange(60, device=device)
    store(x, x, paged.key_cache, paged.value_cache, slots, **paged.scales)
    back = paged.dequantized(torch.float64).key_cache.flatten(0, 1)
    largest = x.abs().amax(-1, keepdim=True).double()
    allowed = largest / 253
    if stored is torch.float8_e4m3fn:
        allowed = torch.maximum(x.abs().double() / 16, largest / 457_000)
    assert ((back - x).abs() <= allowed).all()


@every_stored
@every_store
def test_padding_is_skipped(store, stored, device):
    key = torch.randn(3, 2, 16, device=device)
    paged = empty(3, 2, 16, 4, stored, device)
    slots = torch.tensor([9, PAD_SLOT, 3], device=device)
    store(key, -key, paged.key_cache, paged.value_cache, slots, **paged.scales)
    written = paged.key_scales.flatten(0, 1).count_nonzero(-1)
    assert written.nonzero().flatten().tolist() == [3, 9]
    assert torch.equal(paged.value_cache[2, 1].float(), -paged.key_cache[2, 1].float())


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter
@every_stored
@every_store
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_is_not_finite_when_read(store, stored, bad, device):
    key = torch.randn(2, 1, 16, device=device)
    key[1, 0, 5] = bad
    paged = empty(1, 1, 16, 4, stored, device)
    slots = torch.arange(2, device=device)
    store(key, key, paged.key_cache, paged.value_cache, slots, **paged.scales)
    back = paged.dequantized(torch.float32).key_cache[0, :2, 0]
    assert back[0].isfinite().all()
    assert not back[1].isfinite().any()


@every_stored
@every_dtype
@pytest.mark.parametrize(SHAPE_NAMES, SHAPES)
def test_the_twins_attend_to_what_the_cache_stands_for(
    num_heads, num_kv_heads, head_dim, block_size, dtype, stored
):
    query_lens, seq_lens = zip(*CHUNKS, strict=True)
    paged = make_quantized(seq_lens, num_kv_heads, head_dim, block_size, stored, "cpu")
    plain = paged.dequantized(dtype)
    query = strided((sum(query_lens), num_heads, head_dim), dtype, "cpu")
    starts = starts_of(query_lens, "cpu")
    args = starts, max(query_lens), 0.3
    out = reference.paged_attention_prefill(query, *paged.args, *args, **paged.scales)
    last = reference.paged_attention_decode(query[:6], *paged.args, 0.3, **paged.scales)
    for seq in (0, 2, 3, 4, 5):
        rows = slice(int(starts[seq]), int(starts[seq + 1]))
        assert_close(out[rows], dense_attention(query[rows], *plain.dense(seq), 0.3))
        one = query[seq : seq + 1]
        assert_close(last[seq : seq + 1], dense_attention(one, *plain.dense(seq), 0.3))


@every_stored
@every_dot_dtype
@pytest.mark.parametrize(SHAPE_NAMES, SHAPES)
def test_decode_is_the_twin_s(num_heads, num_kv_heads, head_dim, block_size, dtype, stored, device):
    seq_lens = [1, 0, block_size, 67, 300]
    paged = make_quantized(seq_lens, num_kv_heads, head_dim, block_size, stored, device)
    query = strided((len(seq_lens), num_heads, head_dim), dtype, device)
    for chosen in [{}, *options(num_heads, device)[-1:]]:
        args, given = (query, *paged.args, head_dim**-0.5), paged.scales | chosen
        expected = reference.paged_attention_decode(*args, **given)
        assert_close(paged_attention_decode(*args, **given), expected)


@every_stored
@every_dot_dtype
@pytest.mark.parametrize(SHAPE_NAMES, SHAPES)
def test_prefill_is_the_twin_s(
    num_heads, num_kv_heads, head_dim, block_size, dtype, stored, device
):
    query_lens, seq_lens = zip(*CHUNKS, strict=True)
    paged = make_quantized(seq_lens, num_kv_heads, head_dim, block_size, stored, device)
    query = strided((sum(query_lens) + 3, num_heads, head_dim), dtype, device)
    starts = starts_of(query_lens, device)
    for chosen in [{}, *options(num_heads, device)[-1:]]:
        args = query, *paged.args, starts, max(query_lens), head_dim**-0.5
        given = paged.scales | chosen
        expected = reference.paged_attention_prefill(*args, **given)
        assert_close(paged_attention_prefill(*args, **given), expected)


@every_stored
@every_dtype
def test_a_cpu_stores_the_twin_s_bits_and_attends_to_them(dtype, stored):
    paged, twin = (empty(4, 2, 16, 8, stored, "cpu") for _ in range(2))
    key, query = torch.randn(9, 2, 16).to(dtype), torch.randn(9, 4, 16).to(dtype)
    tables = torch.tensor([[2, 0]], dtype=torch.int32)
    lens = torch.tensor([9], dtype=torch.int32)
    slots = tables[0, torch.arange(9) // 8].long() * 8 + torch.arange(9) % 8
    outs = []
    for each, module in ((paged, ops), (twin, reference)):
        caches = each.key_cache, each.value_cache
        module.store_kv(key, -key, *caches, slots, **each.scales)
        args = *caches, tables, lens
        starts = starts_of([9], "cpu")
        outs += [
            module.paged_attention_decode(query[8:], *args, 0.25, **each.scales),
            module.paged_attention_prefill(query, *args, starts, 9, 0.25, **each.scales),
        ]
    for ours, theirs in zip(bits(paged), bits(twin), strict=True):
        assert torch.equal(ours, theirs)
    assert_close(outs[0], outs[2])
    assert_close(outs[1], outs[3])


def far_apart(paged):
    """The same with blocks FAR bytes apart or a little more, so that all strides differ."""
    storage = torch.empty(2 * FAR + 8192, dtype=torch.uint8, device=paged.key_cache.device)

    def moved(view, i):
        far = storage[1024 * i :].view(view.dtype)
        strides = (FAR + 256 * i) // view.element_size(), *view[0].contiguous().stride()
        far = far.as_strided(view.shape, strides, far.storage_offset())
        far.copy_(view)
        return far

    views = paged.key_cache, paged.value_cache, paged.key_scales, paged.value_scales
    keys, values, *scales = (moved(view, i) for i, view in enumerate(views))
    return type(paged)(keys, values, paged.block_tables, paged.seq_lens, *scales)


@every_stored
def test_offsets_reach_past_int32(stored, device):
    paged = make_quantized([12], 2, 16, 4, stored, device, max_blocks=3)
    far = far_apart(paged)
    key = torch.randn(1, 2, 16, device=device)
    slot = torch.tensor([2 * 4 + 1], device=device)
    for each in (paged, far):
        store_kv(key, -key, each.key_cache, each.value_cache, slot, **each.scales)
    for ours, theirs in zip(bits(far), bits(paged), strict=True):
        assert torch.equal(ours, theirs)
    query = torch.randn(1, 2, 16, device=device)
    starts = starts_of([1], device)
    outs = [
        (
            paged_attention_decode(query, *each.args, 0.25, **each.scales),
            paged_attention_prefill(query, *each.args, starts, 1, 0.25, **each.scales),
        )
        for each in (paged, far)
    ]
    assert torch.equal(outs[0][0], outs[1][0])
    assert torch.equal(outs[0][1], outs[1][1])


def test_a_mismatch_is_refused_by_name(device):
    paged = make_quantized([5], 2, 16, 8, torch.int8, device)
    query = torch.randn(1, 4, 16, device=device)
    key = torch.randn(1, 2, 16, device=device)
    slot = torch.zeros(1, dtype=torch.int64, device=device)

    def attend(**changes):
        paged_attention_decode(query, *paged.args, 1.0, **(paged.scales | changes))

    with pytest.raises(ValueError, match="value_scales is None, required are both or neither"):
        attend(value_scales=None)
    with pytest.raises(ValueError, match=r"key_cache has dtype torch\.int8; it must be torch\.fl"):
        attend(key_scales=None, value_scales=None)
    with pytest.raises(ValueError, match=r"key_scales has dtype torch\.float32; it must be torch"):
        attend(key_scales=paged.key_scales.float())
    with pytest.raises(ValueError, match=r"value_scales has shape \(\d, 8, 1\)"):
        attend(value_scales=paged.value_scales[..., :1])
    with pytest.raises(
        ValueError, match=r"key_cache has dtype torch\.float32, required with key_s"
    ):
        store_kv(key, key, *(2 * [paged.key_cache.float()]), slot, **paged.scales)
