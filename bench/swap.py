"""Measures moves of KV: swaps against memcpy, resuming against recomputing, codecs, the disk.

    python bench/swap.py [--quick] [--json FILE] [--model DIR] [--device cuda] [--disk-dir DIR]

- `payload_over_memcpy`: KV bytes per second of swapping one sequence's blocks, which are scattered
  on the device, ÷ bytes per second of a copy in one piece. The number is that of the slower
  direction. For each direction the best of many rounds counts; swap and copy take turns.
- `resume_recompute_over_swap`: time to recompute a context of 1,000 tokens ÷ time to swap it out
  and in.
- The codecs run on real KV of the shipped model, on one thread.
- The disk's own speed is measured (nothing cached), with and without a codec.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from harness.case import SHIPPED_MODEL, Results, Table, arguments, main
from harness.turns import turns
from kv.codecs import CodecTable, measure_codecs
from kv.memcpy import swap_over_memcpy
from kv.real_model import load_engine, texts
from make_model import Sizes, make_model

from gpu_worker.kv.codecs.lossless import LosslessCodec
from gpu_worker.kv.codecs.names import parse_codec
from gpu_worker.kv.device_pool import KvPool
from gpu_worker.kv.disk_pool import DiskPool
from gpu_worker.kv.host_pool import HostPool
from gpu_worker.loading.device import pick_device, pick_dtype
from gpu_worker.loading.threads import set_num_threads
from gpu_worker.models.registry import open_model

CONTEXT = 1000
_SWAP_BYTES = 64 * 1024**2
_MIB = 1024**2


def recompute_over_swap(
    model: Path, dtype: torch.dtype, device: str, num_rounds: int
) -> dict[str, float]:
    """Restore a context by recomputation and by swap, in turn; check that the KV is the same."""
    num_blocks = -(-CONTEXT // 16)
    engine = load_engine(model, 2 * num_blocks, dtype, device)
    pool = engine.pool
    (token_ids,) = texts(model, CONTEXT, 1)
    host_pool = HostPool(pool.blocks_as_bytes, num_blocks)
    blocks = np.arange(num_blocks, dtype=np.int32)

    def recompute() -> None:
        engine.run(token_ids, 0, 0, CONTEXT)

    def swap() -> None:
        host_pool.swap_out(blocks, blocks)
        host_pool.swap_in(blocks, blocks + num_blocks)
        host_pool.begin_step()
        host_pool.synchronize()

    durations: dict[Callable[[], None], list[float]] = {recompute: [], swap: []}
    recompute()  # warms up, and computes the KV that is swapped
    swap()
    for _, work in turns(durations, num_rounds):
        start_s = time.perf_counter()
        work()
        durations[work].append(time.perf_counter() - start_s)
    back = pool.blocks_as_bytes
    assert torch.equal(back[:num_blocks], back[num_blocks:])
    recompute_s, swap_s = (statistics.median(each) for each in durations.values())
    return {
        "resume_recompute_ms": recompute_s * 1e3,
        "resume_swap_ms": swap_s * 1e3,
        "resume_recompute_over_swap": recompute_s / swap_s,
    }


def disk_speed(pool: KvPool, directory: Path, num_bytes: int, codec: str) -> dict[str, float]:
    """Return KV bytes per second to and from the disk. A store ends when the disk has the bytes."""
    num_blocks = max(1, num_bytes // pool.block_bytes)
    host_pool = HostPool(pool.blocks_as_bytes, num_blocks)
    spec = parse_codec(codec)
    records = None
    if spec.is_lossless:
        records = LosslessCodec(spec, pool.block_bytes, pool.layout.itemsize)
    disk = DiskPool(host_pool.blocks, num_blocks, directory, records)
    dtype = pool.layout.dtypes[0]
    numbers = torch.randn(num_blocks * pool.block_bytes // dtype.itemsize).to(dtype)
    host_pool.blocks[:] = numbers.view(torch.uint8).view(num_blocks, -1).numpy()
    blocks = np.arange(num_blocks, dtype=np.int32)
    start_s = time.perf_counter()
    disk.store(blocks, blocks, 1)
    disk.synchronize()
    disk.forget_cached_pages()
    store_s = time.perf_counter() - start_s
    start_s = time.perf_counter()
    disk.load(blocks, blocks, 1)
    disk.synchronize()
    load_s = time.perf_counter() - start_s
    ends = disk.take_ended(1)
    assert len(ends.stored) == len(ends.loaded) == num_blocks
    disk.close()
    num_bytes = num_blocks * pool.block_bytes
    return {
        f"disk_{spec.codec}_store_gb_s": num_bytes / store_s / 1e9,
        f"disk_{spec.codec}_load_gb_s": num_bytes / load_s / 1e9,
    }


def report_codecs(table: CodecTable) -> dict[str, float]:
    """Print the results of `measure_codecs`; return its numbers by name."""
    print(f"\ncodecs on KV of the shipped model; perplexity without one {table.perplexity:.4f}")
    rows = Table(
        *("codec:<24", "ratio:.3f", "encode GB/s:.2f", "decode GB/s:.2f"),
        *("max error:.4f", "perplexity:.4f"),
    )
    numbers = {"codec_none_perplexity": table.perplexity}
    for name, cost in table.costs.items():
        is_lossy = cost.perplexity is not None
        errors = {"max_error": cost.max_error, "perplexity": cost.perplexity} if is_lossy else {}
        values = {
            "ratio": cost.ratio,
            "encode_gb_s": cost.encode_gb_s,
            "decode_gb_s": cost.decode_gb_s,
            **errors,
        }
        rows.row(name, *values.values())
        key = "codec_" + name.replace(":", "_").replace(", plain", "_plain")
        numbers |= {f"{key}_{number}": value for number, value in values.items()}
    return numbers


def measure(given: argparse.Namespace) -> Results:
    set_num_threads(None)
    device = pick_device(given.device)
    with tempfile.TemporaryDirectory() as made:
        model = given.model or Path(made)
        if given.model is None:
            make_model(model, Sizes())
        config = open_model(model).config
        dtype = pick_dtype("auto", config, device)

        block_bytes = KvPool(config, 2, 16, dtype, device).block_bytes
        num_blocks = 2 * max(1, _SWAP_BYTES // block_bytes)
        pool = KvPool(config, num_blocks, 16, dtype, device)
        results = swap_over_memcpy(pool, 20 if given.quick else 100)
        print(f"swaps of {num_blocks // 2} blocks of {block_bytes / _MIB:.2f} MiB, {device}")
        for kind in ("memcpy", "one_run", "scattered"):
            out, into = (results[f"{kind}_{way}_gb_s"] for way in ("out", "in"))
            print(f"  {kind.replace('_', ' '):12} out {out:6.2f} GB/s, in {into:6.2f} GB/s")
        print(f"  payload over memcpy: {results['payload_over_memcpy']:.2f}")

        resume = recompute_over_swap(model, dtype, str(device), 3 if given.quick else 10)
        results |= resume
        recompute_ms, swap_ms, ratio = resume.values()
        print(f"\nresuming {CONTEXT:,} tokens:", end=" ")
        print(f"recompute {recompute_ms:.1f} ms, swap {swap_ms:.1f} ms, ratio {ratio:.1f}")
    print(f"\ndisk at {given.disk_dir}, nothing cached")
    for codec in ("none", "zstd"):
        speed = disk_speed(pool, given.disk_dir, (64 if given.quick else 256) * _MIB, codec)
        results |= speed
        store_gb_s, load_gb_s = speed.values()
        print(f"  {codec:6} store {store_gb_s:.2f} GB/s, load {load_gb_s:.2f} GB/s")
    table = measure_codecs(SHIPPED_MODEL, torch.bfloat16, 4 if given.quick else 16)
    return results | report_codecs(table)


if __name__ == "__main__":
    parser = arguments(__doc__, quick="fewer rounds; under a minute")
    add = parser.add_argument
    add("--model", type=Path, metavar="DIR", help="to resume on; default: a random 125M Llama")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--disk-dir", type=Path, default=Path("/var/tmp"), help="on the disk to time")  # noqa: S108
    main(parser.parse_args(), measure)
