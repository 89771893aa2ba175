"""What moving KV costs: swaps against memcpy, resuming against recomputing, codecs, the disk.

- `payload_over_memcpy`: KV bytes per second of swapping one sequence's blocks out and in, scattered
  on the device, over those of copying as many bytes in one piece; the worse of both directions,
  each by the best of many rounds taken by turns.
- `resume_recompute_over_swap`: time to compute a context of 1,000 tokens again, over the time to
  swap it out and in.
- codecs on real KV of the shipped model, one thread.
- the disk: its own speed (nothing cached), with and without a codec.

    python bench/swap.py [--quick] [--json FILE] [--model DIR] [--device cuda] [--disk-dir DIR]
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from kv_codecs import CodecTable, measure_codecs
from make_model import Sizes, make_model
from real_kv import load_engine, texts

from gpu_worker.kv.codecs.lossless import LosslessCodec
from gpu_worker.kv.codecs.names import parse_codec
from gpu_worker.kv.device_pool import KvPool
from gpu_worker.kv.disk_pool import DiskPool
from gpu_worker.kv.host_pool import HostPool
from gpu_worker.loading.device import pick_device, pick_dtype, set_num_threads
from gpu_worker.models.registry import open_model
from gpu_worker.step.messages import Int32Array

SHIPPED_MODEL = Path(__file__).parents[1] / "models" / "quire-tiny-python"
CONTEXT = 1000
_SWAP_BYTES = 64 * 1024**2
_MIB = 1024**2


def swap_over_memcpy(pool: KvPool, num_rounds: int) -> dict[str, float]:
    """Swap blocks and copy as many bytes in one piece, by turns."""
    num_blocks = pool.num_blocks // 2
    host_pool = HostPool(pool.blocks_as_bytes, num_blocks)
    is_gpu = pool.device.type == "cuda"
    device = pool.blocks_as_bytes[:num_blocks]
    host = torch.zeros(device.shape, dtype=torch.uint8, pin_memory=is_gpu)
    hosts = np.arange(num_blocks, dtype=np.int32)
    scattered = np.array(random.Random(0).sample(range(pool.num_blocks), num_blocks), np.int32)

    def swap_out(blocks: Int32Array) -> Callable[[], None]:
        return lambda: host_pool.swap_out(blocks, hosts)

    def swap_in(blocks: Int32Array) -> Callable[[], None]:
        def work() -> None:
            host_pool.swap_in(hosts, blocks)
            host_pool.begin_step()

        return work

    def copy(source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        if is_gpu:
            return lambda: target.copy_(source, non_blocking=True)
        return lambda: np.copyto(target.numpy(), source.numpy())

    works = {
        "memcpy out": copy(device, host),
        "memcpy in": copy(host, device),
        "one run out": swap_out(hosts),
        "one run in": swap_in(hosts),
        "scattered out": swap_out(scattered),
        "scattered in": swap_in(scattered),
    }

    def timed(work: Callable[[], None]) -> float:
        start_s = time.perf_counter()
        work()
        host_pool.synchronize()
        if is_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - start_s

    rounds = [{name: timed(work) for name, work in works.items()} for _ in range(num_rounds)]
    best_s = {name: min(each[name] for each in rounds) for name in works}
    num_bytes = num_blocks * pool.block_bytes
    result = {
        f"{name.replace(' ', '_')}_gb_s": num_bytes / seconds / 1e9
        for name, seconds in best_s.items()
    }
    for kind in ("one run", "scattered"):
        ratios = (best_s[f"memcpy {way}"] / best_s[f"{kind} {way}"] for way in ("out", "in"))
        result[f"{kind.replace(' ', '_')}_over_memcpy"] = min(ratios)
    return result | {"payload_over_memcpy": result["scattered_over_memcpy"]}


def recompute_over_swap(
    model: Path, dtype: torch.dtype, device: str, num_rounds: int
) -> dict[str, float]:
    """Bring a context back both ways, by turns, checking that the KV is the same."""
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

    durations: dict[str, list[float]] = {"recompute": [], "swap": []}
    for _ in range(num_rounds + 1):
        for name, work in (("recompute", recompute), ("swap", swap)):
            start_s = time.perf_counter()
            work()
            durations[name].append(time.perf_counter() - start_s)
    back = pool.blocks_as_bytes
    assert torch.equal(back[:num_blocks], back[num_blocks:])
    recompute_s, swap_s = (statistics.median(each[1:]) for each in durations.values())
    return {
        "resume_recompute_ms": recompute_s * 1e3,
        "resume_swap_ms": swap_s * 1e3,
        "resume_recompute_over_swap": recompute_s / swap_s,
    }


def disk_speed(pool: KvPool, directory: Path, num_bytes: int, codec: str) -> dict[str, float]:
    """KV bytes per second to and from the disk; the first by the time that the disk has them."""
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


def print_codecs(table: CodecTable) -> None:
    """Print what `measure_codecs` gives."""
    print(f"\ncodecs on KV of the shipped model; perplexity without one {table.perplexity:.4f}")
    heads = f"{'ratio':>6} {'enc GB/s':>9} {'dec GB/s':>9} {'max error':>10} {'perplexity':>11}"
    print(f"{'':24} {heads}")
    for name, cost in table.costs.items():
        line = f"{name:24} {cost.ratio:6.3f} {cost.encode_gb_s:9.2f} {cost.decode_gb_s:9.2f}"
        if cost.perplexity is not None:
            line += f" {cost.max_error:10.4f} {cost.perplexity:11.4f}"
        print(line)


def codec_numbers(table: CodecTable) -> dict[str, float]:
    """As JSON names them."""
    numbers = {"codec_none_perplexity": table.perplexity}
    for name, cost in table.costs.items():
        key = "codec_" + name.replace(":", "_").replace(", plain", "_plain")
        numbers |= {
            f"{key}_ratio": cost.ratio,
            f"{key}_encode_gb_s": cost.encode_gb_s,
            f"{key}_decode_gb_s": cost.decode_gb_s,
        }
        if cost.perplexity is not None:
            numbers |= {f"{key}_perplexity": cost.perplexity, f"{key}_max_error": cost.max_error}
    return numbers


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds; under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    parser.add_argument("--model", type=Path, help="to resume on; default: a random 125M Llama")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--disk-dir", type=Path, default=Path("/var/tmp"), help="on the disk")  # noqa: S108
    args = parser.parse_args()
    set_num_threads(None)
    device = pick_device(args.device)
    with tempfile.TemporaryDirectory() as made:
        if args.model is None:
            args.model = Path(made)
            make_model(args.model, Sizes())
        config = open_model(args.model).config
        dtype = pick_dtype("auto", config, device)
        num_rounds = 20 if args.quick else 100

        pool = KvPool(config, 2, 16, dtype, device)
        num_blocks = 2 * max(1, _SWAP_BYTES // pool.block_bytes)
        pool = KvPool(config, num_blocks, 16, dtype, device)
        results = swap_over_memcpy(pool, num_rounds)
        print(f"swaps of {num_blocks // 2} blocks of {pool.block_bytes / _MIB:.2f} MiB, {device}")
        for kind in ("memcpy", "one_run", "scattered"):
            out, into = (results[f"{kind}_{way}_gb_s"] for way in ("out", "in"))
            print(f"  {kind.replace('_', ' '):12} out {out:6.2f} GB/s, in {into:6.2f} GB/s")
        print(f"  payload over memcpy: {results['payload_over_memcpy']:.2f}")

        resume = recompute_over_swap(args.model, dtype, str(device), 3 if args.quick else 10)
        results |= resume
        recompute_ms, swap_ms, ratio = resume.values()
        print(f"\nresuming {CONTEXT:,} tokens:", end=" ")
        print(f"recompute {recompute_ms:.1f} ms, swap {swap_ms:.1f} ms, ratio {ratio:.1f}")
    num_bytes = (64 if args.quick else 256) * _MIB
    print(f"\ndisk at {args.disk_dir}, nothing cached")
    for codec in ("none", "zstd"):
        speed = disk_speed(pool, args.disk_dir, num_bytes, codec)
        results |= speed
        store_gb_s, load_gb_s = speed.values()
        print(f"  {codec:6} store {store_gb_s:.2f} GB/s, load {load_gb_s:.2f} GB/s")
    table = measure_codecs(SHIPPED_MODEL, torch.bfloat16, 4 if args.quick else 16)
    print_codecs(table)
    results |= codec_numbers(table)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
