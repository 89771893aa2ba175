"""Measures what a CPU can do at most: bytes read from memory and bf16 operations in a second.

    python bench/ceilings.py --num-threads 2

Shares of these say how far a step is from what the machine allows. Run on its own: whatever else
runs takes its part of both.
"""

import argparse
import functools
import json

import torch

from gpu_worker.loading.measure import least_s

_READ_BYTES = 1 << 30
_GEMM_SIZE = 2048
_NUM_ROUNDS = 5


def read_bytes_per_s() -> float:
    """Of a sum over memory that no cache holds."""
    data = torch.ones(_READ_BYTES // 4)
    return _READ_BYTES / least_s(data.sum, _NUM_ROUNDS)


def bf16_flops() -> float:
    """Of a product of large square matrices in the layout that linear maps use."""
    x = torch.randn(_GEMM_SIZE, _GEMM_SIZE, dtype=torch.bfloat16)
    weight = torch.ops.mkldnn._reorder_linear_weight(torch.randn_like(x))  # noqa: SLF001
    apply = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001
    product = functools.partial(apply, x, weight, None, "none", [], "")
    return 2 * _GEMM_SIZE**3 / least_s(product, _NUM_ROUNDS)


def _main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-threads", type=int, default=2, help="default: 2")
    given = parser.parse_args()
    torch.set_num_threads(given.num_threads)
    with torch.inference_mode():
        print(
            json.dumps({"read_bytes_per_s": read_bytes_per_s(), "bf16_flops": bf16_flops()}),
            flush=True,
        )


if __name__ == "__main__":
    _main()
