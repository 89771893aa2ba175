"""Measures a CPU's limits: bytes per second from memory, and bf16 operations per second.

    python bench/ceilings.py --num-threads 2

Prints both limits as JSON. bench/serve.py prints the share of the limits that a step reaches. Run
this benchmark alone, because other work lowers both numbers.
"""

import functools
import json

import torch
from harness.case import arguments, main

from gpu_worker.loading.measure_rates import least_s

_READ_BYTES = 1 << 30
_GEMM_SIZE = 2048


def read_bytes_per_s(num_rounds: int) -> float:
    """Return the bytes per second of a sum over more memory than any cache holds."""
    data = torch.ones(_READ_BYTES // 4)
    return _READ_BYTES / least_s(data.sum, num_rounds)


def bf16_flops(num_rounds: int) -> float:
    """Return the operations per second of a large matrix product, packed like a linear map."""
    x = torch.randn(_GEMM_SIZE, _GEMM_SIZE, dtype=torch.bfloat16)
    weight = torch.ops.mkldnn._reorder_linear_weight(torch.randn_like(x))  # noqa: SLF001
    apply = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001
    product = functools.partial(apply, x, weight, None, "none", [], "")
    return 2 * _GEMM_SIZE**3 / least_s(product, num_rounds)


if __name__ == "__main__":
    parser = arguments(__doc__, quick="two rounds of each instead of five")
    parser.add_argument("--num-threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.num_threads)
    rounds = 2 if given.quick else 5
    with torch.inference_mode():
        results = main(
            given,
            lambda _: {
                "read_bytes_per_s": read_bytes_per_s(rounds),
                "bf16_flops": bf16_flops(rounds),
            },
        )
    print(json.dumps(results), flush=True)
