"""Linear maps for groups of rows, with weights of 8 or 4 bits, in plain torch.

Symbols: `R` rows of the result, `X` maps, `K` input features, `N` output features, `G` groups of
input features.
"""

import torch

from kernels.reference.linear.quantized import quantized_linear


def grouped_quantized_linear(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    ends: torch.Tensor,
    sources: torch.Tensor | None,
    places: torch.Tensor | None,
    num_rows: int,
    *,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `out[places[i]] = x[sources[i]] @ w + b` for each i in [0, R), where R is `num_rows`.

    w and b are the weight and the bias of i's map, which follows from `ends` as in
    `grouped_linear`. `sources` and `places` are as in `grouped_linear`, too. `values[m]`,
    `scales[m]` and `offsets[m]` are the weight of map m, as in `quantized_linear`. `values` are
    int8 or float8_e4m3fn [X, K, N], or uint8 [X, K / 2, N]. `scales` are [X, G, N], floats or, for
    MXFP4, uint8. `bias` is [X, N], of the dtype of `x`.

    Returns:
        `out`, a new tensor [R, N]. An i that is not below the last of `ends` has no map; the row
        `places[i]` of such an i is undefined.
    """
    out = x.new_zeros(num_rows, values.shape[2])
    start = 0
    for nth, end in enumerate(ends.tolist()):
        index = torch.arange(start, end, device=x.device)
        read = x[index if sources is None else sources[index]]
        where = index if places is None else places[index]
        nth_offsets = None if offsets is None else offsets[nth]
        nth_bias = None if bias is None else bias[nth]
        out[where] = quantized_linear(read, values[nth], scales[nth], nth_offsets, nth_bias)
        start = end
    return out
