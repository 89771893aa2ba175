"""How layers form KV groups."""

import pytest

from gpu_worker.kv.layer_groups import group_layers

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
        (((W,) * 5 + (None,)) * 10 + (W, W), (None, *(W,) * 4), 13),  # Gemma 3 27B: 52 and 10
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
        # 50 local and 10 global layers: ten global layers fill half of a block of ten local ones.
        (((W,) * 5 + (None,)) * 10, ((LOCAL,) * 5 + (FULL,)) * 10, (None, *(W,) * 5), 10),
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
