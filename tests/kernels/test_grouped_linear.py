import pytest
import torch

from kernels import reference
from kernels.grouped_maps import GroupedMaps
from kernels.triton.linear.grouped import grouped_linear
from kernels.triton.linear.tile_sizes import BY_ROWS, FLOAT32_BY_ROWS, choose, fewest_rows
from tests.kernels.tensors import far_apart, strided
from tests.kernels.tolerance import assert_close, every_dot_dtype


def make_maps(sizes, num_in, num_out, dtype, device, *, is_by_input=False):
    """Maps whose weights have these numbers of rows; None: no weight."""
    scale = num_in**-0.5
    width = num_out if is_by_input else num_in
    weights = [
        None if size is None else (torch.randn(size, width, device=device) * scale).to(dtype)
        for size in sizes
    ]
    addresses = [0 if weight is None else weight.data_ptr() for weight in weights]
    return GroupedMaps(
        num_in,
        num_out,
        weights,
        torch.tensor(addresses, device=device),
        torch.tensor([size or 0 for size in sizes], dtype=torch.int32, device=device),
        is_by_input,
    )


def ends_of(counts, device):
    return torch.tensor(counts, device=device).cumsum(0).to(torch.int32)


@every_dot_dtype
@pytest.mark.parametrize(
    ("counts", "num_in", "num_out"),
    [
        ([0, 1, 0, 2, 0], 40, 70),  # tiles of 16 rows
        ([17, 0, 40], 200, 5),
        ([130, 3], 64, 130),  # of 64
        ([300], 30, 33),  # of 128
    ],
)
def test_each_row_is_mapped_by_its_group_s_weight(counts, num_in, num_out, dtype, device):
    maps = make_maps([num_out] * len(counts), num_in, num_out, dtype, device)
    num_rows = sum(counts)
    x = strided((num_rows, num_in), dtype, device)
    ends = ends_of(counts, device)
    expected = reference.grouped_linear(x, maps, ends, None, None, num_rows, None)
    by_group = torch.split(x, counts)
    plain = [part.float() @ w.float().t() for part, w in zip(by_group, maps.weights, strict=True)]
    assert_close(expected, torch.cat(plain).to(dtype))
    assert_close(grouped_linear(x, maps, ends, None, None, num_rows, None), expected)


@every_dot_dtype
@pytest.mark.parametrize("is_by_input", [False, True])
def test_rows_are_gathered_scattered_and_added_by_maps_of_any_rank(is_by_input, dtype, device):
    sizes = [24, None, 2, 100]
    num_in, num_out = (100, 80) if is_by_input else (48, 100)
    maps = make_maps(sizes, num_in, num_out, dtype, device, is_by_input=is_by_input)
    counts, num_rows = [3, 2, 0, 18], 30  # the last seven rows have no group
    x = torch.randn(12, num_in, device=device).to(dtype)
    sources = torch.randint(0, 12, (num_rows,), device=device)
    places = torch.randperm(40, device=device)[:num_rows]
    out = torch.randn(40, num_out, device=device).to(dtype)
    args = x, maps, ends_of(counts, device), sources, places, num_rows
    expected = reference.grouped_linear(*args, out.clone())
    actual = grouped_linear(*args, out.clone())
    assert_close(actual, expected)
    written = (actual != out).any(1).nonzero().squeeze(1)
    with_weight = torch.cat([places[:3], places[5:23]])
    assert written.tolist() == with_weight.sort().values.tolist()
    if not is_by_input:
        assert torch.equal(actual[places[:3], 24:], out[places[:3], 24:]), "beyond its rank"


def test_no_row_s_group_depends_on_the_host(device):
    """The launch reads on the device, in `ends`, which rows belong to each group."""
    maps = make_maps([8] * 3, 16, 8, torch.float32, device)
    x = torch.randn(9, 16, device=device)
    ends = ends_of([9, 0, 0], device)
    first = grouped_linear(x, maps, ends, None, None, 9, None)
    ends.copy_(ends_of([1, 3, 5], device))
    again = grouped_linear(x, maps, ends, None, None, 9, None)
    assert_close(again, reference.grouped_linear(x, maps, ends, None, None, 9, None))
    assert torch.equal(again[0], first[0])
    assert not torch.equal(again[1], first[1])


def test_rows_reach_past_int32_offsets(device):
    maps = make_maps([20, 20], 24, 20, torch.float16, device)
    x = far_apart((3, 24), torch.float16, device)
    args = x, maps, ends_of([1, 2], device), None, None, 3, None
    assert_close(grouped_linear(*args), reference.grouped_linear(*args))


@pytest.mark.parametrize("choices", [BY_ROWS, FLOAT32_BY_ROWS], ids=["16 bits", "32 bits"])
def test_every_tile_is_chosen_by_some_number_of_rows(choices):
    assert fewest_rows(8) == (1, 129, 513)
    assert [choose(choices, rows, 8) for rows in fewest_rows(8)] == list(choices)
    assert choose(choices, 128, 8) == choices[0]
    assert [choose(choices, rows) for rows in fewest_rows()] == list(choices)


@pytest.mark.parametrize(
    ("choices", "dtype"), [(BY_ROWS, torch.bfloat16), (FLOAT32_BY_ROWS, torch.float32)]
)
def test_tiles_fit_the_least_shared_memory(choices, dtype):
    for tile in choices:
        numbers = (tile.rows + tile.columns) * tile.inputs * (tile.num_stages - 1)
        assert numbers * dtype.itemsize < 99 * 1024, "of compute capability 8.6"


def test_no_rows_give_none(device):
    maps = GroupedMaps.of([torch.randn(5, 8, device=device)] * 2)
    none = torch.empty(0, 8, device=device)
    assert grouped_linear(none, maps, ends_of([0, 0], device), None, None, 0, None).shape == (0, 5)


def test_what_does_not_fit_is_named(device):
    maps = GroupedMaps.of([torch.randn(5, 8, device=device)] * 2)
    x, ends = torch.randn(4, 8, device=device), ends_of([1, 3], device)
    for args, message in (
        ((x[:, 1:], maps, ends, None, None, 4, None), r"x has shape \(4, 7\)"),
        ((x, maps, ends[:1], None, None, 4, None), r"ends has shape \(1,\)"),
        ((x, maps, ends.long(), None, None, 4, None), "ends has dtype torch.int64"),
        ((x, maps, ends, ends, None, 4, None), r"sources has shape \(2,\)"),
        ((x, maps, ends, None, None, 4, x), r"out has shape \(4, 8\)"),
    ):
        with pytest.raises(ValueError, match=message):
            grouped_linear(*args)


def test_a_weight_that_the_kernel_would_misread_is_refused():
    with pytest.raises(ValueError, match="required are a multiple of 16"):
        GroupedMaps.of([torch.randn(41)[1:].view(5, 8)])
