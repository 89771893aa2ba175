"""Quantizes KV to eight bits per number, with a scale for each key and each value of a kv head.

Symbols: `N` blocks, `Y` bytes of a block, `D` head dim, `R` rows of a block: a row is the key or
the value of one token slot in one kv head of one layer; `E` bytes of an encoded block: R scales in
bfloat16, then R x D numbers.
"""

import torch

from gpu_worker.kv.codecs.names import Codec, CodecSpec

_SCALE = torch.bfloat16
"""The dtype of scales. It has float32's range. Rounding a scale costs little precision, because
numbers are divided by the rounded scale."""
_FP8_NUMBERS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""The fp8 value of each byte."""
_LARGEST = {Codec.INT8: 127.0, Codec.FP8: 448.0}


class QuantizedCodec:
    """Encodes blocks on the device that holds them.

    A number's error is at most 1/120 (int8) or 1/25 (fp8) of the largest number in its row; in fp8,
    small numbers have smaller errors. A row that contains an infinity or NaN decodes to infinities
    or NaNs.
    """

    def __init__(
        self, spec: CodecSpec, block_bytes: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        """Set up for blocks of `block_bytes` bytes that hold numbers of `dtype`.

        Args:
            spec: A quantizing codec.
            block_bytes: Y.
            head_dim: D.
            dtype: bfloat16, float16 or float32.
        """
        self.name = str(spec)
        self._codec = spec.codec
        self._dtype = dtype
        self._head_dim = head_dim
        self._num_rows = block_bytes // (dtype.itemsize * head_dim)
        self._scales_bytes = self._num_rows * _SCALE.itemsize
        self.record_bytes = self._scales_bytes + self._num_rows * head_dim
        """E, the bytes of an encoded block."""

    def encode(self, blocks: torch.Tensor) -> torch.Tensor:
        """Encode uint8[N, Y], contiguous, as uint8[N, E]."""
        numbers = blocks.view(self._dtype).view(-1, self._num_rows, self._head_dim).float()
        largest = _LARGEST[self._codec]
        # `aminmax` takes eight times as long on a CPU.
        scales = (numbers.abs().amax(-1, keepdim=True) / largest).to(_SCALE)  # [N, R, 1]
        divisors = scales.float().masked_fill_(scales == 0, 1.0)
        quotients = (numbers / divisors).clamp_(-largest, largest)  # the input is kept
        if self._codec is Codec.INT8:
            small = quotients.round_().to(torch.int8)
        else:
            small = quotients.to(torch.float8_e4m3fn)
        encoded = torch.empty(
            len(blocks), self.record_bytes, dtype=torch.uint8, device=blocks.device
        )
        encoded[:, : self._scales_bytes] = scales.view(len(blocks), -1).view(torch.uint8)
        encoded[:, self._scales_bytes :] = small.view(torch.uint8).view(len(blocks), -1)
        return encoded

    def decode(self, encoded: torch.Tensor) -> torch.Tensor:
        """Decode uint8[N, E], contiguous, to uint8[N, Y]."""
        scales = encoded[:, : self._scales_bytes].view(_SCALE).view(-1, self._num_rows, 1)
        small = encoded[:, self._scales_bytes :]
        if self._codec is Codec.INT8:
            numbers = small.view(torch.int8).float()
        elif small.is_cuda:
            numbers = small.view(torch.float8_e4m3fn).float()
        else:
            numbers = torch.take(_FP8_NUMBERS, small.long())  # three times as fast as a cast
        numbers = numbers.view(-1, self._num_rows, self._head_dim)
        decoded = numbers.mul_(scales.float()).to(self._dtype)
        return decoded.view(len(encoded), -1).view(torch.uint8)
