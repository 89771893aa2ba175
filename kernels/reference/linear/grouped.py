"""Linear maps for groups of rows, in plain torch: all rows of a group use the same map.

Symbols: `R` rows that are mapped, `X` maps, `K` input features, `N` output features.
"""

import torch

from kernels.grouped_maps import GroupedMaps


def grouped_linear(
    x: torch.Tensor,
    maps: GroupedMaps,
    ends: torch.Tensor,
    sources: torch.Tensor | None,
    places: torch.Tensor | None,
    num_rows: int,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Add `x[sources[i]] @ w.T` to `out[places[i]]` for each i in [0, R), where R is `num_rows`.

    w is the weight of i's map, the first map m with i < ends[m]. Nothing is computed for an i that
    is not below any end. `sources` and `places` are int64[R], and no number occurs twice in
    `places`. If `sources` is None, row i of `x` is read; if `places` is None, row i of `out` is
    written. `ends` is int32[X], ascending. `x` is `[*, K]`.

    If `maps.biases` is given, the bias of i's map is added, too. If `out` is None, the products are
    returned in a new tensor `[R, N]`, in which elements that no map writes are undefined. Sums are
    fp32, and a result is rounded once.
    """
    if out is None:
        out = x.new_zeros(num_rows, maps.num_out)
    start = 0
    for nth, (weight, end) in enumerate(zip(maps.weights, ends.tolist(), strict=True)):
        if weight is not None and end > start:
            index = torch.arange(start, end, device=x.device)
            read = x[index if sources is None else sources[index]]
            where = index if places is None else places[index]
            width = len(weight) if maps.is_by_input else maps.num_in
            wide = weight.float() if maps.is_by_input else weight.float().t()
            product = read[:, :width].float() @ wide  # [*, N], or fewer
            if maps.biases is not None:
                product += maps.biases[nth].float()
            product += out[where, : product.shape[1]].float()
            out[where, : product.shape[1]] = product.to(x.dtype)
        start = end
    return out
