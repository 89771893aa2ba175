"""How layers form KV groups."""

import pytest

from gpu_worker.kv.layer_groups import MAX_GROUPS, group_layers

W = 512


@pytest.mark.parametrize(
    ("windows", "groups", "layers_per_block"),
    [
        ((None,) * 4, (None,), 4),
        ((W,) * 4, (W,), 4),  # Mistral 7B v0.1, Phi 3
        ((4096,) * 4, (None,), 4),  # a window as long as the longest sequence equals full attention
        ((W, None) * 13, (None, W), 13),  # Gemma 2 2B, gpt-oss
        (((W,) * 3 + (None,)) * 8, (None, W, W, W), 8),  # Cohere 2, OLMo 3 7B
        (((W,) * 5 + (None,)) * 4 + (W, W), (None, *(W,) * 6), 4),  # Gemma 3 1B: 22 and 4
        (((W,) * 5 + (None,)) * 10 + (W, W), (None, *(W,) * 6), 10),  # Gemma 3 27B: 52 and 10
    ],
)
def test_groups_waste_little(windows, groups, layers_per_block):
    found = group_layers(windows, max_model_len=4096)
    assert (found.windows, found.layers_per_block) == (groups, layers_per_block)
    seen = [None if w is not None and w >= 4096 else w for w in windows]
    assert [found.windows[group] for group in found.group_of] == seen


FULL, LOCAL = 4096, 8192  # numbers of a token's KV in a layer of Gemma 4 31B


@pytest.mark.parametrize(
    ("windows", "sizes", "groups", "num_layers"),
    [
        # 50 local and 10 global layers: a block holds ten global layers, or five local ones.
        (((W,) * 5 + (None,)) * 10, ((LOCAL,) * 5 + (FULL,)) * 10, (None, *(W,) * 10), 10),
        # Gemma 4 26B-A4B: a block of five global layers has no room for three local ones.
        (((W,) * 5 + (None,)) * 5, ((LOCAL,) * 5 + (FULL,)) * 5, (None, *(W,) * 9), 5),
        # All layers with full attention are in one group, however large they are.
        ((None,) * 5, (1, 2, 3, 4, 5), (None,), 5),
        # A layer is never larger than a block.
        ((None, W, W), (5, 1, 1), (None, W), 2),
        ((None, W, W), (1, 5, 5), (None, W, W), 1),
    ],
)
def test_layers_of_other_sizes_share_equal_blocks(windows, sizes, groups, num_layers):
    found = group_layers(windows, max_model_len=4096, sizes=sizes)
    assert (found.windows, found.layers_per_block) == (groups, num_layers)
    assert [found.windows[group] for group in found.group_of] == list(windows)


GEMMA_3_27B = ((W,) * 5 + (None,)) * 10 + (W, W)


@pytest.mark.parametrize(
    ("max_model_len", "num_layers"),
    [
        (W + 1, [10, 13, 13, 13, 13]),  # a group without a window has as many tokens as another one
        (2 * W, [10, 11, 11, 11, 11, 8]),
        (16 * W, [10, 10, 10, 10, 10, 10, 2]),
        # 13 groups of four layers would take 3 % less, which six groups are not worth.
        (2**20, [10, 10, 10, 10, 10, 10, 2]),
    ],
)
def test_the_more_tokens_a_group_has_the_better_it_fills_its_blocks(max_model_len, num_layers):
    found = group_layers(GEMMA_3_27B, max_model_len)
    assert list(map(found.group_of.count, range(len(found.windows)))) == num_layers


def test_there_are_as_many_groups_as_kinds_of_windows_or_at_most_the_limit():
    assert len(group_layers((None, *(W,) * 100), 2**20).windows) == MAX_GROUPS
    windows = tuple(range(1, MAX_GROUPS + 3))
    assert group_layers(windows, 2**20).windows == windows
