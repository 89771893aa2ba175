"""Counts the host's operations for one step on a GPU, by kind of step. Needs no GPU.

    python bench/host_operations.py --json host_operations.json

A worker's executor runs a decoder of a Llama's shape, 32 layers of tiny widths, on a CPU that
passes for a GPU: each op goes through its Triton launcher, which launches nothing, and replays of
CUDA graphs compute nothing. The benchmark counts Python calls of torch's functions and methods,
operations of torch's dispatcher, launches of Triton kernels, and replays of graphs. Reads of
attributes do not count. `host_operations` is the sum of calls, launches and replays. `upload` is
the number of bytes that the step copies to the device.

The counts are exact: each run gives the same numbers.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from harness.case import Table, arguments, main
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from gpu_worker.memory import transfer
from kernels import ops, reference
from kernels.cpu import library

_NUM_LAYERS = 32
_NUM_DECODES = 32
_CONTEXT = 40
_LONG_CONTEXT = 990
"""The length in tokens of a sequence that decodes."""


@dataclass(slots=True)
class Counts:
    """The host's operations."""

    calls: int = 0
    dispatches: int = 0
    launches: int = 0
    replays: int = 0
    upload: int = 0
    """In bytes."""

    @property
    def total(self) -> int:
        return self.calls + self.launches + self.replays


class _Counter:
    """Counts within `counting`, except within `paused`."""

    def __init__(self) -> None:
        self.counts = Counts()
        self._is_paused = False

    @contextlib.contextmanager
    def counting(self) -> Iterator[Counts]:
        self.counts = Counts()
        with _Calls(self), _Dispatches(self):
            yield self.counts

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        before, self._is_paused = self._is_paused, True
        yield
        self._is_paused = before

    def add(self, name: str, count: int = 1) -> None:
        if not self._is_paused:
            setattr(self.counts, name, getattr(self.counts, name) + count)


class _Calls(TorchFunctionMode):
    def __init__(self, counter: _Counter) -> None:
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") != "__get__":
            self._counter.add("calls")
        return func(*args, **(kwargs or {}))


class _Dispatches(TorchDispatchMode):
    def __init__(self, counter: _Counter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._counter.add("dispatches")
        return func(*args, **(kwargs or {}))


COUNTER = _Counter()


def _through_launcher(twin: Callable[..., Any]) -> Callable[..., Any]:
    launch = ops.launcher(twin)

    def op(*args: Any, **kwargs: Any) -> Any:
        launch(*args, **kwargs)
        with COUNTER.paused():
            return twin(*args, **kwargs)

    return op


def _prepare_launcher(name: str) -> Callable[..., Any]:
    """Wrap a launcher of attention, so that the output is zeros."""
    launcher = getattr(
        importlib.import_module(f"kernels.triton.attention.{name.split('_')[1]}"), name
    )

    def prepare(*args: Any, out: torch.Tensor, **kwargs: Any) -> Callable[[Any], None]:
        with COUNTER.paused():
            out.zero_()
        launch: Callable[[Any], None] = launcher(*args, out=out, **kwargs)
        return launch

    return prepare


def _upload(arrays: Any, device: torch.device) -> list[torch.Tensor]:
    """Stands in for `transfer.upload` to a GPU, which copies all arrays at once."""
    buffer = torch.empty(transfer.packed_bytes(arrays), dtype=torch.uint8, device=device)
    return transfer.upload_into(buffer, arrays)


def _launch(*_: Any, **__: Any) -> None:
    """Stands in for `JITFunction.run`."""
    COUNTER.add("launches")


def _pack(arrays: Any, *, pin: bool, pack: Callable[..., Any] = transfer._pack) -> Any:  # noqa: SLF001
    """Counts the bytes of arrays that travel to the device together."""
    COUNTER.add("upload", transfer.packed_bytes(arrays))
    return pack(arrays, pin=pin)


JITFunction.run = _launch  # type: ignore[method-assign]
transfer.upload = _upload
transfer._pack = _pack  # noqa: SLF001
library.native = lambda: None  # type: ignore[assignment]
for name in reference.__all__:
    setattr(ops, name, _through_launcher(getattr(reference, name)))

for name in ("prepare_decode", "prepare_prefill"):
    setattr(ops, name, _prepare_launcher(name))

# After the replacements, because modules import these functions by name.
from contract.lora import LoraAdapter  # noqa: E402
from contract.sampling import SamplingParams  # noqa: E402
from contract.step import NewSequence, Plan, StepId  # noqa: E402
from contract.worker_limits import Limits  # noqa: E402
from gpu_worker.kv.device_pool import KvPool  # noqa: E402
from gpu_worker.lora.adapted_maps import AdaptedMap, adapted_maps  # noqa: E402
from gpu_worker.lora.adapter import Adapter, LowRankMap  # noqa: E402
from gpu_worker.lora.slots import AdapterSlots  # noqa: E402
from gpu_worker.models.experts.config import ExpertsConfig  # noqa: E402
from gpu_worker.models.llama.config import LlamaConfig, split_llama_config  # noqa: E402
from gpu_worker.models.llama.decoder import build_llama  # noqa: E402
from gpu_worker.models.rope import RopeConfig  # noqa: E402
from gpu_worker.ranks.collectives import Ranks  # noqa: E402
from gpu_worker.ranks.shards import Place  # noqa: E402
from gpu_worker.speculative.draft_model import ModelDrafter  # noqa: E402
from gpu_worker.speculative.lengths import DraftLengths  # noqa: E402
from gpu_worker.step.executor import Executor  # noqa: E402
from gpu_worker.step.graphs import piecewise_graphs  # noqa: E402
from gpu_worker.step.graphs.cuda_graphs import Between  # noqa: E402
from gpu_worker.weights import gpu_linear  # noqa: E402
from gpu_worker.weights.linear import PlainLinear  # noqa: E402
from gpu_worker.weights.reader import draw_weights  # noqa: E402
from kernels.batch_invariant import BatchInvariantAttention  # noqa: E402

CPU = torch.device("cpu")
CONFIG = LlamaConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128,
    max_model_len=1024,
    num_layers=_NUM_LAYERS,
    num_kv_heads=2,
    head_dim=8,
    eos_token_ids=(),
    dtype="float32",
    hidden_size=32,
    num_heads=4,
    intermediate_size=32,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=10000.0),
    rotary_dim=8,
    has_fused_qkv=False,
    has_fused_gate_up=False,
    tie_word_embeddings=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    attention_scale=8**-0.5,
    windows=(None,) * _NUM_LAYERS,
    experts=None,
)
LIMITS = Limits(
    max_num_seqs=_NUM_DECODES + 1,
    max_model_len=1024,
    max_num_batched_tokens=2048,
    num_blocks=512,
    block_size=16,
    vocab_size=CONFIG.vocab_size,
)
STEPS = {
    "decode": (_NUM_DECODES, _CONTEXT, 0),
    "decode_long": (_NUM_DECODES, _LONG_CONTEXT, 0),
    "mixed_128": (_NUM_DECODES, _CONTEXT, 96),
    "mixed_512": (_NUM_DECODES, _CONTEXT, 480),
    "mixed_544": (_NUM_DECODES, _CONTEXT, 512),
    "prefill_512": (0, 0, 512),
}
"""Rows that decode, their tokens, and the tokens of a prompt beside them."""
FEW_STEPS = ("decode", "mixed_128")
KINDS = {
    "": STEPS,
    "adapters": FEW_STEPS,
    "experts": FEW_STEPS,
    "drafts": FEW_STEPS,
    "ranks": FEW_STEPS,
    "invariant": FEW_STEPS,
}
"""Maps a kind of worker to its counted steps. "" is a plain worker. `adapters` has a LoRA adapter
for each row; `experts` has 8 experts; `drafts` has a draft model of 32 layers that guesses two
tokens for each row. `ranks` is rank 0 of two that split each layer. `invariant` is batch-invariant.
"""
_NUM_DRAFTS = 2
_RANK = 4


class _RankOfTwo(Ranks):
    """Rank 0 of two. Its collectives count as calls, as if the other rank had the same numbers."""

    def __init__(self) -> None:
        self.place = Place(0, 2)
        self._stage = self._host = None


def _exchange(*_: Any, **__: Any) -> None:
    COUNTER.add("calls")


def _gather(parts: list[torch.Tensor], own: torch.Tensor, **_: Any) -> None:
    COUNTER.add("calls")
    with COUNTER.paused():
        for part in parts:
            part.copy_(own)


torch.distributed.all_reduce = torch.distributed.broadcast = _exchange
torch.distributed.all_gather = _gather


class CountedGraphs:
    """A `GraphBackend` whose replays are counted, and compute nothing."""

    def capture(self, compute: Callable[[Between], None]) -> Callable[[], object]:
        parts: list[Callable[[], object]] = [self._count]

        def between(work: Callable[[], object]) -> None:
            parts.extend((work, self._count))

        compute(between)
        return lambda: [part() for part in parts]

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    @staticmethod
    def _count() -> None:
        COUNTER.add("replays")


def _row(executor: Executor, row: int, num_tokens: int, num_computed: int = 0) -> NewSequence:
    blocks = np.arange(num_tokens // LIMITS.block_size + 2, dtype=np.int32) + row * 4
    num_adapters = len(executor._adapters.by_number)  # noqa: SLF001
    return NewSequence(
        seq_id=row,
        row=row,
        token_ids=np.arange(num_tokens, dtype=np.int32) % CONFIG.vocab_size,
        num_prompt_tokens=num_tokens,
        num_computed_tokens=num_computed,
        block_ids=blocks,
        sampling=SamplingParams(seed=0, temperature=0.0, ignore_eos=True),
        max_total_tokens=num_tokens + 20,
        adapter=1 + row % num_adapters if num_adapters else 0,
    )


def _step(
    executor: Executor, number: int, new: tuple[NewSequence, ...], *, counted: bool
) -> Counts:
    plan = Plan(
        StepId(number),
        int(executor.rows.is_decoding.sum()),
        new_sequences=new,
        chunk_rows=np.array([each.row for each in new], np.int32),
        chunk_lens=np.array(
            [len(each.token_ids) - each.num_computed_tokens for each in new], np.int32
        ),
    )
    if not counted:
        with COUNTER.paused():
            executor.step(plan)
        return Counts()
    with COUNTER.counting() as counts:
        executor.step(plan)
    return counts


def count(
    executor: Executor, num_decodes: int, num_context_tokens: int, num_prompt_tokens: int
) -> Counts:
    """Count the operations of one step, in which rows decode beside a prompt."""
    executor.reset()
    if num_decodes:
        num_computed = num_context_tokens - _CONTEXT
        decoding = tuple(
            _row(executor, row, num_context_tokens, num_computed) for row in range(num_decodes)
        )
        _step(executor, 1, decoding, counted=False)
    new = (_row(executor, num_decodes, num_prompt_tokens),) if num_prompt_tokens else ()
    _step(executor, 2, (), counted=False) if num_decodes else None
    return _step(executor, 3, new, counted=True)


def _adapter(number: int) -> Adapter:
    """Make an adapter that adds a little to every map of the decoder."""

    def low_rank(of: AdaptedMap) -> LowRankMap:
        down, up = torch.randn(_RANK, of.num_in), torch.randn(of.num_local_out, _RANK)
        return LowRankMap(PlainLinear(down, None), PlainLinear(up / 100, None), _RANK)

    layers = tuple(
        {of.name: low_rank(of) for of in adapted_maps(CONFIG, index)}
        for index in range(_NUM_LAYERS)
    )
    return Adapter(LoraAdapter(str(number), b"", ""), layers)


def make_executor(kind: str, *, has_graphs: bool) -> Executor:
    """Build a worker's executor over the tiny decoder; see `KINDS`.

    Without graphs, the executor computes each expert and each adapter separately.
    """
    config, limits, slots, drafter = CONFIG, LIMITS, None, None
    adapters: dict[int, Adapter] = {}
    gpu_linear.is_here = lambda _: has_graphs
    if kind == "experts":
        experts = ExpertsConfig(
            layers=(True,) * config.num_layers,
            num_experts=8,
            num_per_token=2,
            intermediate_size=config.intermediate_size,
            has_shares_of_one=True,
        )
        config = replace(config, experts=experts)
    if kind == "adapters":
        adapters = {number: _adapter(number) for number in (1, 2)}
        limits = replace(limits, adapters={each.id: n for n, each in adapters.items()})
        slots = AdapterSlots(config, CPU) if has_graphs else None
    is_invariant = kind == "invariant"
    ranks = _RankOfTwo() if kind == "ranks" else None
    model = draw_weights(
        lambda weights: build_llama(config, weights),
        torch.float32,
        CPU,
        ranks=ranks,
        is_batch_invariant=is_invariant,
    )
    local_config = config if ranks is None else split_llama_config(config, ranks.place)

    def make_pool() -> KvPool:
        dtypes = (torch.float32,) * _NUM_LAYERS
        pool = KvPool(local_config, limits.num_blocks, limits.block_size, dtypes, CPU)
        if is_invariant:
            pool.attention = BatchInvariantAttention(limits.max_num_seqs, CPU)
        return pool

    if kind == "drafts":
        drafter = ModelDrafter(model, make_pool(), _NUM_DRAFTS, limits, CPU)
        # The measured time must not decide how many tokens are guessed.
        DraftLengths.choose = lambda _, rows: np.full(len(rows), _NUM_DRAFTS)  # type: ignore[method-assign]
    executor = Executor(
        *(model, make_pool(), limits, (), CPU),
        ranks=ranks,
        drafter=drafter,
        adapters=adapters,
        slots=slots,
    )
    if has_graphs:
        piecewise_graphs.piece_sizes = lambda _: (128, 512)  # the steps here need no other sizes
        for has_adapters in (False, True)[: 1 if slots is None else 2]:
            if drafter is None:  # with a drafter, tokens come from the host
                executor.capture_decodes(CountedGraphs(), lambda _: None, has_adapters=has_adapters)
            executor.capture_pieces(CountedGraphs(), lambda _: None, has_adapters=has_adapters)
        if drafter is not None:
            drafter.capture_decodes(CountedGraphs(), lambda _: None)
            drafter.capture_pieces(CountedGraphs(), lambda _: None)
    return executor


def measure(_: Any) -> dict[str, int]:
    """Count all kinds of steps, with graphs and without."""
    table = Table(
        "worker:<9", "step:<12", "graphs:<6", "calls:d", "dispatches:d", "launches:d", "replays:d",
        "upload:d", "sum:d",
    )  # fmt: skip
    results: dict[str, int] = {}
    for kind, steps in KINDS.items():
        for has_graphs in (False, True):
            executor = make_executor(kind, has_graphs=has_graphs)
            for step in steps:
                counts = count(executor, *STEPS[step])
                numbers = [getattr(counts, field.name) for field in fields(Counts)]
                graphs = "yes" if has_graphs else "no"
                table.row(kind or "plain", step, graphs, *numbers, counts.total)
                name = f"{kind}_{step}" if kind else step
                name = name if has_graphs else f"{name}_eager"
                results[f"{name}_host_operations"] = counts.total
                results[f"{name}_dispatches"] = counts.dispatches
                results[f"{name}_upload_bytes"] = counts.upload
    return results


if __name__ == "__main__":
    main(arguments(__doc__, quick="has no effect: it takes seconds").parse_args(), measure)
