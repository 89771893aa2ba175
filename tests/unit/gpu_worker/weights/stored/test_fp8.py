"""What numbers in fp8 and their scales mean, written out."""

import torch

from gpu_worker.weights.stored.format import Fp8Format, ScaleShape
from gpu_worker.weights.stored.fp8 import fp8_tensors, unpack_fp8


def test_scales_of_a_tensor_a_channel_and_a_block():
    weight = torch.arange(6.0).view(2, 3).to(torch.float8_e4m3fn)
    by_tensor = Fp8Format(ScaleShape.TENSOR, "weight_scale")
    by_channel = Fp8Format(ScaleShape.CHANNEL, "weight_scale")
    by_block = Fp8Format((1, 2), "weight_scale_inv")
    for stored, scales, expected in (
        (by_tensor, [2.0], [[0, 2, 4], [6, 8, 10]]),
        (by_channel, [[2.0], [0.5]], [[0, 2, 4], [1.5, 2, 2.5]]),
        (by_block, [[1.0, 2.0], [3.0, 4.0]], [[0, 1, 4], [9, 12, 20]]),
    ):
        scale = torch.tensor(scales)
        assert fp8_tensors(stored, 2, 3)[stored.scale_name] == (scale.shape, torch.float32)
        tensors = {"weight": weight, stored.scale_name: scale}
        whole = slice(None)
        assert unpack_fp8(stored, tensors, whole, whole).dequantized().tolist() == expected
        part = unpack_fp8(stored, tensors, slice(1, 2), slice(1, 3)).dequantized()
        assert part.tolist() == [expected[1][1:]]
