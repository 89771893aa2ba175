"""Builds the host and disk tiers of KV memory, with sizes and codecs from the settings."""

import hashlib
import os
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

import torch
from isal import isal_zlib

from gpu_worker.kv.codecs.lossless import LosslessCodec
from gpu_worker.kv.codecs.names import CodecSpec
from gpu_worker.kv.codecs.quantized import QuantizedCodec
from gpu_worker.kv.codecs.records import MeteredRecords, QuantizedRecords, RecordCodec
from gpu_worker.kv.device_pool import KvPool
from gpu_worker.kv.disk_file import DiskFile
from gpu_worker.kv.disk_pool import DiskPool
from gpu_worker.kv.host_pool import HostPool
from gpu_worker.kv.kept_file import unlocked_bytes
from gpu_worker.kv.layer_groups import LayerGroups
from gpu_worker.loading.kv_memory import free_host_kv_bytes
from gpu_worker.settings import WorkerSettings
from gpu_worker.weights.json_fields import ModelError
from gpu_worker.weights.model_config import ModelConfig

_GIB = 1024**3
_PIECE_BYTES: Final = 1024**2
_UNNAMED_DIR: Final = Path("/var/tmp")  # noqa: S108 - a file there has no name


@dataclass(frozen=True, slots=True)
class LowerTiers:
    """The pools of the host tier and the disk tier; a pool is None if its tier does not exist."""

    host_pool: HostPool | None = None
    disk_pool: DiskPool | None = None

    @property
    def num_host_blocks(self) -> int:
        return 0 if self.host_pool is None else self.host_pool.num_blocks

    @property
    def num_disk_blocks(self) -> int:
        return 0 if self.disk_pool is None else self.disk_pool.num_blocks


def kv_identity(
    settings: WorkerSettings,
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    groups: LayerGroups,
    arithmetic: str,
) -> bytes:
    """Return a hash of everything, except earlier tokens, that determines the KV of a token.

    `arithmetic` names the hardware and kernels that compute the KV
    (`gpu_worker.loading.device.name_arithmetic`). The last bits of KV from other hardware or
    kernels differ, and could change a request's tokens, so such KV counts as different.

    Other machines share a far tier, and their copies of the model's files must count as the same
    model. So with a far tier, the files are hashed by name and content. Without a far tier, the
    files are hashed by name, size and time of change, so a copy of the files counts as another
    model. `config` is hashed, too, because it depends on more than the files: the setting
    `max_model_len` selects LongRoPE's factors, which rotate keys.
    """
    describe = _content if settings.far_kv_url else _size_and_time
    files = sorted((path.name, describe(path)) for path in directory.iterdir() if path.is_file())
    what = (
        (version("quire"), version("transformers"), version("torch"), arithmetic),
        (settings.attention_backend, settings.batch_invariant),
        files,
        config,
        (settings.model_class, settings.quantization, str(dtype), settings.kv_dtype),
        (str(settings.host_codec), str(settings.disk_codec)),
        (settings.block_size, groups),
    )
    return hashlib.sha256(repr(what).encode()).digest()


def _size_and_time(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _content(path: Path) -> bytes:
    """Return a hash of a file's content.

    The hash is the SHA-256 of the CRCs of the file's pieces. A CRC is computed as fast as a piece
    is read; SHA-256 of the pieces themselves would take longer.
    """
    digest, piece = hashlib.sha256(), memoryview(bytearray(_PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while num_bytes := file.readinto(piece):
            digest.update(isal_zlib.crc32(piece[:num_bytes]).to_bytes(4, "little"))
    return digest.digest()


def open_lower_tiers(
    settings: WorkerSettings, pool: KvPool, config: ModelConfig, identity: bytes | None = None
) -> LowerTiers:
    """Allocate the host and disk tiers.

    `identity` is the hash that `kv_identity` returns. Disk blocks outlive the process if there is
    an `identity` and the setting `disk_kv_dir` is set.

    Raises:
        ModelError: The disk lacks room, or there is a disk tier without a host tier.
    """
    host_codec = _quantized(settings.host_codec, pool.block_bytes, config, pool.layout.dtype)
    host_block_bytes = pool.block_bytes if host_codec is None else host_codec.record_bytes
    num_bytes = free_host_kv_bytes(pool.device, settings.role)
    if settings.host_kv_memory_gb is not None:
        num_bytes = int(settings.host_kv_memory_gb * _GIB)
    if num_host_blocks := num_bytes // host_block_bytes:
        host_pool = HostPool(
            pool.blocks_as_bytes,
            num_host_blocks,
            codec=host_codec,
            has_checksums=settings.kv_checksum,
        )
        return LowerTiers(host_pool, _open_disk_pool(settings, host_pool, pool, config, identity))
    if settings.disk_kv_memory_gb:
        raise ModelError(
            f"disk-kv-memory-gb is {settings.disk_kv_memory_gb}, but KV reaches the disk through"
            " host blocks, of which there are none: set host-kv-memory-gb"
        )
    return LowerTiers()


def _open_disk_pool(
    settings: WorkerSettings,
    host_pool: HostPool,
    pool: KvPool,
    config: ModelConfig,
    identity: bytes | None,
) -> DiskPool | None:
    num_bytes = int(settings.disk_kv_memory_gb * _GIB)
    block_bytes = host_pool.blocks.shape[1]
    codec = _record_codec(settings, block_bytes, pool, config)
    num_blocks = num_bytes // DiskFile.extent_bytes(block_bytes, codec)
    if not num_blocks:
        return None
    directory = settings.disk_kv_dir or _UNNAMED_DIR
    if settings.disk_kv_dir is None:
        identity = None
    if identity is not None:
        size = (num_blocks, block_bytes)
        identity = hashlib.sha256(identity + repr(size).encode()).digest()
    try:
        room = os.statvfs(directory)
        free_bytes = room.f_bavail * room.f_frsize
        if identity is not None:
            free_bytes += unlocked_bytes(directory)
        if num_bytes > free_bytes:
            raise ModelError(
                f"disk-kv-memory-gb is {settings.disk_kv_memory_gb}; {directory} has "
                f"{free_bytes / _GIB:.1f} GiB free"
            )
        return DiskPool(host_pool.blocks, num_blocks, directory, codec, identity)
    except OSError as error:
        raise ModelError(f"disk-kv-dir is {directory}: {error.strerror}") from error


def _record_codec(
    settings: WorkerSettings, block_bytes: int, pool: KvPool, config: ModelConfig
) -> RecordCodec | None:
    """Return the codec of the disk tier; None: the disk stores the bytes of host blocks.

    The codec encodes host blocks, which the host tier's codec may have encoded before.
    """
    spec, host = settings.disk_codec, settings.host_codec
    if spec.is_lossless:
        itemsize = 1 if host.is_quantized else pool.layout.itemsize
        return MeteredRecords(LosslessCodec(spec, block_bytes, itemsize), spec)
    if spec.is_quantized and not host.is_quantized:
        num_parts = pool.layout.num_sides
        part = _quantized(spec, block_bytes // num_parts, config, pool.layout.dtype)
        assert part is not None, "the codec is quantized"
        return MeteredRecords(QuantizedRecords(part, num_parts), spec)
    return None


def _quantized(
    spec: CodecSpec, block_bytes: int, config: ModelConfig, dtype: torch.dtype
) -> QuantizedCodec | None:
    if not spec.is_quantized:
        return None
    if config.has_exact_keys:
        raise ModelError(
            f"host-kv-codec or disk-kv-codec is {spec}; {config.architecture} has ALiBi, whose keys"
            " hold positions that 8 bits would round"
        )
    if config.kv_shapes:
        raise ModelError(
            f"host-kv-codec or disk-kv-codec is {spec}; {config.architecture} has layers that"
            " differ in kv heads or head dim, whose KV only kv-cache-dtype can quantize"
        )
    return QuantizedCodec(spec, block_bytes, config.head_dim, dtype)
