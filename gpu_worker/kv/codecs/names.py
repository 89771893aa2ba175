"""Names the codecs of the host and disk tiers, and parses the flags that select them."""

from dataclasses import dataclass
from enum import StrEnum


class Codec(StrEnum):
    """How a tier encodes a block."""

    NONE = "none"
    LZ4 = "lz4"
    ZSTD = "zstd"
    GZIP = "gzip"
    INT8 = "int8"
    FP8 = "fp8"


_LEVELS = {Codec.LZ4: (1, 12), Codec.ZSTD: (1, 22), Codec.GZIP: (0, 3)}
"""Lowest and highest level of lz4's high compression, zstd, and igzip (Intel's fast gzip)."""


@dataclass(frozen=True, slots=True)
class CodecSpec:
    """A codec with its level."""

    codec: Codec
    level: int | None = None
    """Compression level; None: the default. Only lossless codecs have levels."""

    @property
    def is_lossless(self) -> bool:
        """Whether the codec compresses without loss, by a ratio that depends on the content."""
        return self.codec in _LEVELS

    @property
    def is_quantized(self) -> bool:
        """Whether the codec quantizes, with a fixed ratio and a loss of precision."""
        return self.codec in (Codec.INT8, Codec.FP8)

    def __str__(self) -> str:
        """Return the name and level, as `parse_codec` takes them."""
        return self.codec.value if self.level is None else f"{self.codec.value}:{self.level}"


def parse_codec(text: str) -> CodecSpec:
    """Parse a codec's name, with an optional level: `zstd:3`.

    Raises:
        ValueError: There is no such codec or level; the message names the valid ones.
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
