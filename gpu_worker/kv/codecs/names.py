"""Names the ways in which the lower tiers may hold KV: as it is, smaller, or less precise."""

from dataclasses import dataclass
from enum import StrEnum


class Codec(StrEnum):
    """How a tier holds a block."""

    NONE = "none"
    LZ4 = "lz4"
    ZSTD = "zstd"
    GZIP = "gzip"
    INT8 = "int8"
    FP8 = "fp8"


_LEVELS = {Codec.LZ4: (1, 12), Codec.ZSTD: (1, 22), Codec.GZIP: (0, 3)}
"""Least and most: lz4's high compression, zstd's, and those of igzip, Intel's fast gzip."""


@dataclass(frozen=True, slots=True)
class CodecSpec:
    """A codec as a flag names it."""

    codec: Codec
    level: int | None = None
    """How hard it tries; None: its default. Only lossless ones have levels."""

    @property
    def is_lossless(self) -> bool:
        """Whether it makes blocks smaller by as much as their content allows."""
        return self.codec in _LEVELS

    @property
    def is_quantized(self) -> bool:
        """Whether it makes blocks smaller by a fixed ratio, and what comes back less precise."""
        return self.codec in (Codec.INT8, Codec.FP8)

    def __str__(self) -> str:
        """As `parse_codec` takes it."""
        return self.codec.value if self.level is None else f"{self.codec.value}:{self.level}"


def parse_codec(text: str) -> CodecSpec:
    """Parse a codec's name, with an optional level: `zstd:3`.

    Raises:
        ValueError: says what it must be.
    """
    name, has_level, level = text.partition(":")
    try:
        codec = Codec(name)
    except ValueError:
        raise ValueError(f"must be one of {', '.join(Codec)}") from None
    if not has_level:
        return CodecSpec(codec)
    if codec not in _LEVELS:
        raise ValueError(f"{codec} takes no level")
    least, most = _LEVELS[codec]
    if not level.isdecimal() or not least <= int(level) <= most:
        raise ValueError(f"the level of {codec} must be in [{least}, {most}]")
    return CodecSpec(codec, int(level))
