"""Which variants of Triton's kernels a worker needs after its warm-up.

A program, not a test: Triton must be imported without TRITON_INTERPRET. Takes a model directory, a
seed, and what the worker has:

    graphs           CUDA graphs; otherwise all steps run eagerly
    weights=int8     the weights' quantization, also int4; or "stored", that of the checkpoint
    kv=int8          the dtype of the KV cache, also fp8
    adapter=DIR      a LoRA adapter in some rows; and a second one, added when the worker serves
    late=DIR         a LoRA adapter of a worker that started without any
    ngram            guesses from the rows' own tokens
    draft=DIR        guesses of a model
    shared           attention once to prefixes that decodes share
    ranks            other ranks, which compute nothing

A worker's executor runs on the CPU. Each op first calls its Triton launcher, whose launch only
records the key of the kernel that Triton would compile, and then its twin. After the captures and
`warm_up`, a scheduler drives random requests through the executor: prompts, decodes, mixed steps,
prefix hits, forks, swaps, masks, draws. Prints, as JSON, how many variants the warm-up needs and of
which kernels, and each variant that only the requests need.
"""

import contextlib
import importlib
import json
import random
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction, native_specialize_impl

from kernels import ops, reference
from kernels.cpu import library

MODEL, SEED = Path(sys.argv[1]), int(sys.argv[2])
HAS = dict(each.partition("=")[::2] for each in sys.argv[3:])
VARIANTS = set()
BACKEND = CUDABackend(GPUTarget("cuda", 90, 32))


def zeroed(new):
    """Wrap a function that makes a tensor of whatever the memory holds: it makes one of zeros."""
    return lambda *args, **kwargs: new(*args, **kwargs).zero_()


def record(kernel, *args, grid, warmup, **constants):
    """Stands in for JITFunction.run: records the key by which Triton finds a compiled kernel."""
    del grid, warmup
    bound = dict(zip(kernel.arg_names, args, strict=False)) | constants
    key = [kernel.fn.__name__]
    for param in kernel.params:
        value = bound[param.name]
        if param.is_constexpr:
            key.append(f"{param.name}={value}")
            continue
        is_const = param.is_const
        is_special = not param.do_not_specialize
        by_alignment = not param.do_not_specialize_on_alignment
        kind, hint = native_specialize_impl(BACKEND, value, is_const, is_special, by_alignment)
        key.append(f"{param.name}: {kind} {hint}")
    options = [
        f"{name}={constants[name]}" for name in ("num_warps", "num_stages") if name in constants
    ]
    VARIANTS.add((*key, *options))


def through_launcher(twin):
    launch = ops.launcher(twin)

    def op(*args, **kwargs):
        launch(*args, **kwargs)
        return twin(*args, **kwargs)

    return op


def prepare_launcher(name):
    plain = getattr(ops, name)
    launcher = getattr(
        importlib.import_module(f"kernels.triton.attention.{name.split('_')[1]}"), name
    )

    def prepare(*args, **kwargs):
        launch, twin = launcher(*args, **kwargs), plain(*args, **kwargs)
        return lambda sequences: (launch(sequences), twin(sequences))

    return prepare


# Graphs that compute nothing would leave logits as the memory was: rows would end by logits that
# are not finite, in the warm-up too, and the same seed would not make the same history.
torch.empty, torch.empty_like = zeroed(torch.empty), zeroed(torch.empty_like)
torch.Tensor.new_empty = zeroed(torch.Tensor.new_empty)
JITFunction.run = record
for name in reference.__all__:
    setattr(ops, name, through_launcher(getattr(reference, name)))
for name in ("prepare_decode", "prepare_prefill"):
    setattr(ops, name, prepare_launcher(name))
library.native = lambda: None

# Imported after the ops are replaced, because modules may import them by name.
from contract.sampling import SamplingParams, StructuredOutput  # noqa: E402
from contract.worker_limits import Limits  # noqa: E402
from gpu_worker.kv.device_pool import KvPool  # noqa: E402
from gpu_worker.kv.host_pool import HostPool  # noqa: E402
from gpu_worker.kv.layout import kv_dtypes  # noqa: E402
from gpu_worker.loading import rank_model  # noqa: E402
from gpu_worker.lora.adapter_files import load_adapter  # noqa: E402
from gpu_worker.lora.slots import AdapterSlots  # noqa: E402
from gpu_worker.models.registry import open_model  # noqa: E402
from gpu_worker.ranks.shards import Place  # noqa: E402
from gpu_worker.sampling.grammar_masks import RowGrammars  # noqa: E402
from gpu_worker.sampling.sampler import Sampler  # noqa: E402
from gpu_worker.speculative.draft_model import load_draft_model  # noqa: E402
from gpu_worker.speculative.lengths import DraftLengths  # noqa: E402
from gpu_worker.speculative.ngram import NgramDrafter  # noqa: E402
from gpu_worker.step import shared_prefixes  # noqa: E402
from gpu_worker.step.executor import Executor  # noqa: E402
from gpu_worker.step.graphs import piecewise_graphs  # noqa: E402
from gpu_worker.step.warm_up import warm_up  # noqa: E402
from gpu_worker.weights import gpu_linear  # noqa: E402
from gpu_worker.weights.quantized_linear import Quantization  # noqa: E402
from kernels.triton import configs as tuned  # noqa: E402
from kernels.triton.attention import decode, prefill  # noqa: E402
from rpc.observe import logs  # noqa: E402
from scheduler_svc.core.interface.config import PreemptionMode, SchedulerConfig  # noqa: E402
from scheduler_svc.core.interface.request import Request, SeqKey, SourceId  # noqa: E402
from scheduler_svc.core.scheduler import Scheduler  # noqa: E402


def draw_by_kernel(self, logits, places, rows, positions, *, is_suppressed):
    del is_suppressed
    return self._draw_by_kernel(logits, places, rows, positions)


Sampler._draw = draw_by_kernel
Sampler._likeliest = lambda _, logits: ops.greedy(logits)
# The configuration of a GPU with so many processors that short sequences are split.
tuned._forced[tuned.DecodeConfig] = tuned.DecodeConfig(16, 32, 1, 4, 2, 1)
tuned._forced[tuned.PrefillConfig] = tuned.PrefillConfig(64, 16, 4, 1)
decode.num_processors = prefill.num_processors = lambda _: 132
prefill._LEAST_POSITIONS = 32

CPU = torch.device("cpu")


class WorkBetween:
    """A backend whose replays run only the attention between graphs."""

    def capture(self, compute):
        works = []
        compute(lambda work: work())
        compute(works.append)
        return lambda: [work() for work in works]

    def alias(self, tensor):
        return tensor


class NoStreams:
    """Stands in for the copy streams of a GPU, so that swaps are staged as there."""

    def __getattr__(self, _):
        return contextlib.nullcontext


class OtherRanks:
    """Rank 0's connections with ranks that compute nothing."""

    place = Place()

    def share(self, values):
        """Send nothing."""

    def any_has(self, flags):
        return flags


def refuse_to_go_on(status, _):
    """Raise if a capture has failed."""
    assert "without" not in status, status


def make_worker():
    """Make an executor, with its captures and warm-up, as a GPU worker does.

    Returns the executor, its limits, the largest number of drafts, and how to load another adapter.
    The pool is small, so that sequences are preempted.
    """
    weights = HAS.get("weights")
    source = open_model(
        MODEL, quantization=Quantization(weights) if weights in {"int8", "int4"} else None
    )
    dtype, config = torch.bfloat16 if weights else torch.float32, source.config
    load_one = partial(load_adapter, model=config, dtype=dtype, device=CPU)
    adapters, slots = {}, None
    if "adapter" in HAS:
        adapters, slots = {1: load_one("first", Path(HAS["adapter"]))}, AdapterSlots(config, CPU)
        slots.compile(dtype)
    limits = Limits(
        max_num_seqs=12,
        max_model_len=120,
        max_num_batched_tokens=64,
        num_blocks=70,
        num_host_blocks=60,
        block_size=4,
        vocab_size=config.vocab_size,
        adapters={adapter.id: number for number, adapter in adapters.items()},
    )
    dtypes = kv_dtypes(HAS.get("kv", "auto"), frozenset(), dtype, config.num_layers)
    pool = KvPool(config, limits.num_blocks, limits.block_size, dtypes, CPU)
    drafter, num_drafts = None, 0
    if "ngram" in HAS:
        drafter, num_drafts = NgramDrafter(3, 1, 3), 3
    if "draft" in HAS:
        draft_model = load_draft_model(Path(HAS["draft"]), MODEL, limits, dtype, CPU)
        drafter, num_drafts = draft_model.drafter(2, limits), 2
    ranks = OtherRanks() if "ranks" in HAS else None
    executor = Executor(
        *(source.load(dtype, CPU, lambda _: None), pool, limits, config.eos_token_ids, CPU),
        host_pool=HostPool(pool.blocks_as_bytes, limits.num_host_blocks, streams=NoStreams()),
        structured=RowGrammars(
            MODEL / "tokenizer.json", config.vocab_size, config.eos_token_ids, CPU, is_beside=False
        ),
        ranks=ranks,
        drafter=drafter,
        adapters=adapters,
        slots=slots,
    )
    if "graphs" in HAS:
        rank_model._capture_graphs(
            *(executor, WorkBetween(), refuse_to_go_on, drafter),
            shares_prefixes="shared" in HAS,
            has_adapters=slots is not None,
        )
    warm_up(executor, limits, has_structured_output=True, num_draft_tokens=num_drafts, ranks=ranks)
    return executor, limits, num_drafts, load_one


def draw_sampling(chance):
    return SamplingParams(
        seed=chance.getrandbits(32),
        temperature=chance.choice([0.0, 0.0, 1.0]),
        top_k=chance.choice([0, 20]),
        top_p=chance.choice([1.0, 0.9]),
        frequency_penalty=chance.choice([0.0, 0.0, 0.5]),
        logprobs=chance.choice([None, None, 2]),
        structured=chance.choice([None, None, None, StructuredOutput(grammar="start: /[a-z ]+/")]),
    )


def serve(executor, limits, num_drafts, chance, num_requests):
    """Drive random requests to their end; returns how many steps of each kind there were.

    With drafts, all rows that may have guesses get the most. Drives as many again, a few times, if
    some kind is missing.
    """
    core = Scheduler(
        SchedulerConfig(
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            num_host_blocks=limits.num_host_blocks,
            num_draft_tokens=num_drafts,
            preemption_mode=PreemptionMode.SWAP,
            watermark=0.0,
        )
    )
    samplings, adapters = {}, {}
    beginnings = [[chance.randrange(5, 400) for _ in range(40)] for _ in range(2)]
    seen = dict.fromkeys(("decode", "mixed", "prefill", "swap_out", "swap_in", "copy"), 0)
    seen |= {"guess": 0} if num_drafts else {}
    numbers = [0, *executor._adapters.by_number]
    num_sent, now = 0, 0.0
    num_wanted, most_wanted = num_requests, 5 * num_requests
    for _ in range(5 * 5000):
        if num_sent == num_wanted and not list(core.live):
            if all(seen.values()) or num_wanted == most_wanted:
                break
            num_wanted += num_requests
        if num_sent < num_wanted and chance.random() < 0.2:
            num_sent += 1
            key = num_sent * 10
            tail = [chance.randrange(5, 400) for _ in range(chance.randrange(1, 30))]
            prompt = chance.choice(beginnings)[: chance.choice((0, 13, 40))] + tail
            name = str(key).encode()
            samplings[name] = draw_sampling(chance)
            adapters[name] = chance.choice(numbers)
            core.submit(
                Request(
                    SourceId(0),
                    SeqKey(key),
                    "",
                    np.array(prompt, np.int32),
                    chance.choice((1, 1, 2, 3)),
                    chance.randrange(1, 40),
                    name,
                ),
                now,
            )
        now += 1.0
        plan = core.schedule(now)
        if plan is None:
            continue
        new = tuple(
            replace(each, sampling=samplings[each.sampling], adapter=adapters[each.sampling])
            for each in plan.new_sequences
        )
        num_chunks = len(plan.chunk_rows)
        kind = "mixed" if plan.num_decodes and num_chunks else "prefill" if num_chunks else "decode"
        seen[kind] += 1
        seen["swap_out"] += len(plan.swap_out_src_block_ids)
        seen["swap_in"] += len(plan.swap_in_src_block_ids)
        seen["copy"] += len(plan.copy_src_block_ids)
        launched = executor.launch(replace(plan, new_sequences=new))
        if num_drafts:
            seen["guess"] += launched.scheduled.num_drafting
        result = executor.collect(launched)
        # the machine's load does not change the history
        core.update(replace(result, execute_s=0.0))
    return seen


def main():
    logs.configure("warning", "console", "worker")  # standard output is for the results
    config = (MODEL / "config.json").read_text()
    has_experts = any(name in config for name in ("mixtral", "qwen2_moe", "gpt_oss"))
    is_special = "weights" in HAS or has_experts
    gpu_linear.is_here = lambda device: is_special and device.type != "meta"
    gpu_linear._capability = lambda _: (8, 0)
    piecewise_graphs._MAX_TOKENS = 32  # the largest steps run eagerly
    shared_prefixes.LEAST_TOKENS = 8
    executor, limits, num_drafts, load_one = make_worker()
    known = set(VARIANTS)
    for number, name in enumerate(("adapter", "late"), start=2):
        if name in HAS:
            executor.add_adapter(number, load_one(name, Path(HAS[name])))
    DraftLengths.choose = lambda _, rows: np.full(len(rows), num_drafts)
    seen = serve(executor, limits, num_drafts, random.Random(SEED), num_requests=12)
    new = sorted(map(list, VARIANTS - known))
    kernels = sorted({variant[0] for variant in known})
    found = {"num_known": len(known), "kernels": kernels, "new": new, "seen": seen}
    sys.stdout.write(json.dumps(found) + "\n")


main()
