"""The cases of `gpu_kernels.py`: each kernel, with the shapes of models and of loads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from gpu.dense_attention import flex, sdpa

from kernels import reference
from kernels.grouped_maps import GroupedMaps
from kernels.ops import launcher
from kernels.tuning.workload import ModelSizes, PoolLayout, paged_inputs, queries

LLAMA_8B = ModelSizes(32, 8, 128, 16, torch.bfloat16)
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Prepared:
    """A case with its tensors in memory."""

    launch: Callable[[], object]
    num_bytes: int
    """The least number of bytes to read and write."""
    flops: int = 0
    """Floating-point operations; 0 if memory is the limit on every device."""
    baselines: dict[str, Callable[[], Callable[[], object]]] = field(default_factory=dict)
    """Functions that prepare the launch of a baseline, by its name."""
    expected: str | None = None
    """The baseline whose result must be the same; None: none."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table. The tensors of a case are made when its turn comes."""

    kernel: str
    shape: str
    prepare: Callable[[torch.device], Prepared]


@dataclass(frozen=True, slots=True)
class Size:
    """Bounds of the cases' sizes: none, or tiny for a smoke test."""

    max_seqs: int
    max_tokens: int
    """The limit on tokens of a sequence or a step."""
    max_width: int
    dtype: torch.dtype

    def lens(self, seq_lens: Sequence[int]) -> list[int]:
        """Cut the lengths of a batch to these bounds."""
        return [min(each, self.max_tokens) for each in seq_lens[: self.max_seqs]]


WHOLE = Size(1 << 30, 1 << 30, 1 << 30, torch.bfloat16)
TINY = Size(2, 20, 32, torch.float16)  # the interpreter multiplies no bfloat16


def all_cases(size: Size) -> list[Case]:
    """Return every case; with a tiny `size` the names still have the full shapes."""
    return [*_decode_cases(size), *_prefill_cases(size), *_row_cases(size), *_block_cases(size)]


_MAIN = (
    ("decode", "1x1k 32/8x128 P16"),
    ("decode", "256x1k 32/8x128 P16"),
    ("decode", "64x8k 32/8x128 P16 float8"),
    ("decode", "1x128k 32/8x128 P16"),
    ("decode", "64x8k 32/8x128 P16 32 layers"),
    ("decode", "64x8k 32/8x128 P16 32 layers layer-major"),
    ("prefill", "1x8k 32/8x128 P16"),
    ("prefill", "4x2k 32/8x128 P16"),
    ("prefill", "50 after 30k 32/8x128 P16"),
    ("prefill", "512 after 128k 32/8x128 P16"),
    ("add_rms_norm", "256x4096"),
    ("rotary_store_kv", "256 tokens 32/8x128"),
    ("sample", "1x151936 top_p 0.9"),
    ("sample", "64x151936 top_p 0.9"),
    ("sample", "256x151936 temperature"),
)
"""The cases that tell how fast a model will be."""


def main_cases(size: Size) -> list[Case]:
    """Return the cases that matter most, without FlexAttention, which takes long to compile."""
    named = {(case.kernel, case.shape): case for case in all_cases(size)}

    def without_flex(case: Case) -> Case:
        def prepare(device: torch.device) -> Prepared:
            prepared = case.prepare(device)
            baselines = {k: v for k, v in prepared.baselines.items() if k != "flex"}
            return replace(prepared, baselines=baselines)

        return replace(case, prepare=prepare)

    return [without_flex(named[name]) for name in _MAIN]


def _cut(model: ModelSizes, size: Size) -> ModelSizes:
    if size is WHOLE:
        return model
    return replace(
        model,
        num_heads=min(2, model.num_heads // model.num_kv_heads),
        num_kv_heads=1,
        head_dim=min(model.head_dim, size.max_width),
        dtype=size.dtype,
    )


def _model_text(model: ModelSizes) -> str:
    stored = "" if model.stored is None else f" {str(model.stored).removeprefix('torch.')[:6]}"
    return f"{model.num_heads}/{model.num_kv_heads}x{model.head_dim} P{model.block_size}{stored}"


def _decode(
    size: Size,
    text: str,
    seq_lens: Sequence[int],
    model: ModelSizes = LLAMA_8B,
    *,
    layout: PoolLayout = PoolLayout.BLOCK_MAJOR,
    num_layers: int = 4,
    window: int | None = None,
    with_flex: bool = False,
) -> Case:
    lens = size.lens(seq_lens)
    small = _cut(model, size)

    def prepare(device: torch.device) -> Prepared:
        paged = paged_inputs(small, lens, device, layout, num_layers)
        query = queries(small, len(lens), device)
        scale = small.head_dim**-0.5
        seen = sum(min(each, window or each) for each in lens)
        baselines = {}
        if len(set(lens)) == 1 and small.stored is None and window is None:
            baselines["sdpa"] = lambda: sdpa(query, paged, 1, lens[0])
            if with_flex:
                baselines["flex"] = lambda: flex(query, paged, 1, lens[0])
        return Prepared(
            lambda: launcher(reference.paged_attention_decode)(
                query,
                *paged.args,
                scale,
                window=window,
                key_scales=paged.key_scales,
                value_scales=paged.value_scales,
            ),
            seen * small.slot_bytes() + 2 * query.nbytes,
            baselines=baselines,
            expected="sdpa" if baselines else None,
        )

    notes = "" if window is None else f" window {window}"
    notes += "" if num_layers == 4 else f" {num_layers} layers"
    notes += " layer-major" if layout is PoolLayout.LAYER_MAJOR else ""
    return Case("decode", f"{text} {_model_text(model)}{notes}", prepare)


def _decode_cases(size: Size) -> list[Case]:
    long, uniform = [131_072], [8192] * 64
    cases = [
        _decode(size, "1x128k", long, with_flex=True),
        _decode(size, "64x8k", uniform, with_flex=True),
        _decode(size, "256x1k", [1024] * 256),
        _decode(size, "1x128k+63x512", [131_072, *[512] * 63]),
        _decode(size, "1x1k", [1024]),
        _decode(size, "8x2k", [2048] * 8),
        _decode(size, "64x8k", uniform, window=4096),
        _decode(size, "1x128k", long, replace(LLAMA_8B, num_heads=4, num_kv_heads=1)),
        _decode(size, "16x4k", [4096] * 16, replace(LLAMA_8B, num_kv_heads=32)),
    ]
    for head_dim in (64, 80, 96, 256):
        heads = {"num_heads": 16, "num_kv_heads": 8} if head_dim == 256 else {}
        cases.append(
            _decode(size, "32x8k", [8192] * 32, replace(LLAMA_8B, head_dim=head_dim, **heads))
        )
    for stored in (torch.int8, torch.float8_e4m3fn):
        model = replace(LLAMA_8B, stored=stored)
        cases += [_decode(size, "64x8k", uniform, model), _decode(size, "1x128k", long, model)]
    for block_size in (16, 32, 64, 128):
        model = replace(LLAMA_8B, block_size=block_size)
        if block_size != 16:
            cases.append(_decode(size, "64x8k", uniform, model))
        cases.append(_decode(size, "64x8k", uniform, model, layout=PoolLayout.LAYER_MAJOR))
    # One layer of a whole model (69 GB in all): it reads 64 KiB of each block of 2 MiB.
    cases += [_decode(size, "64x8k", uniform, layout=each, num_layers=32) for each in PoolLayout]
    return cases


def _prefill(
    size: Size,
    text: str,
    chunks: Sequence[tuple[int, int]],  # (query_len, seq_len)
    model: ModelSizes = LLAMA_8B,
    *,
    with_flex: bool = False,
) -> Case:
    seq_lens = size.lens([seq_len for _, seq_len in chunks])
    query_lens = [
        min(query_len, seq_len) for (query_len, _), seq_len in zip(chunks, seq_lens, strict=False)
    ]
    small = _cut(model, size)

    def prepare(device: torch.device) -> Prepared:
        paged = paged_inputs(small, seq_lens, device)
        query = queries(small, sum(query_lens), device)
        starts = torch.tensor([0, *query_lens], device=device).cumsum(0).to(torch.int32)
        scale = small.head_dim**-0.5
        pairs = sum(
            query_len * (seq_len - query_len) + query_len * (query_len + 1) // 2
            for query_len, seq_len in zip(query_lens, seq_lens, strict=True)
        )
        baselines = {}
        if len(set(seq_lens)) == len(set(query_lens)) == 1 and small.stored is None:
            baselines["sdpa"] = lambda: sdpa(query, paged, query_lens[0], seq_lens[0])
            if with_flex:
                baselines["flex"] = lambda: flex(query, paged, query_lens[0], seq_lens[0])
        return Prepared(
            lambda: launcher(reference.paged_attention_prefill)(
                query,
                *paged.args,
                starts,
                max(query_lens),
                scale,
                key_scales=paged.key_scales,
                value_scales=paged.value_scales,
            ),
            sum(seq_lens) * small.slot_bytes() + 2 * query.nbytes,
            4 * pairs * small.num_heads * small.head_dim,
            baselines,
            "sdpa" if baselines else None,
        )

    return Case("prefill", f"{text} {_model_text(model)}", prepare)


def _prefill_cases(size: Size) -> list[Case]:
    whole = [(8192, 8192)]
    return [
        _prefill(size, "1x8k", whole, with_flex=True),
        _prefill(size, "4x2k", [(2048, 2048)] * 4),
        _prefill(size, "32x256", [(256, 256)] * 32),
        _prefill(size, "2k after 30k", [(2048, 32_768)], with_flex=True),
        _prefill(size, "50 after 30k", [(50, 30_050)]),
        _prefill(size, "5 after 30k", [(5, 30_005)]),
        _prefill(size, "512 after 128k", [(512, 131_072)]),
        _prefill(size, "mixed", [(4096, 4096), (17, 9000), (1000, 20_000), (333, 333)]),
        _prefill(size, "1x8k", whole, replace(LLAMA_8B, head_dim=64)),
        _prefill(
            size, "1x8k", whole, replace(LLAMA_8B, num_heads=16, num_kv_heads=8, head_dim=256)
        ),
        _prefill(size, "1x8k", whole, replace(LLAMA_8B, block_size=128)),
        _prefill(size, "1x8k", whole, replace(LLAMA_8B, stored=torch.int8)),
        _prefill(size, "1x8k", whole, replace(LLAMA_8B, stored=torch.float8_e4m3fn)),
    ]


def _rows(
    name: str,
    shape: str,
    make: Callable[[torch.device], tuple[tuple[torch.Tensor, ...], tuple[object, ...], int]],
) -> Case:
    """Make a case whose baseline is the twin; `make` returns tensors, other arguments, bytes."""

    def prepare(device: torch.device) -> Prepared:
        tensors, rest, num_bytes = make(device)
        return Prepared(
            lambda: launcher(getattr(reference, name))(*tensors, *rest),
            num_bytes,
            baselines={"torch": lambda: lambda: getattr(reference, name)(*tensors, *rest)},
        )

    return Case(name, shape, prepare)


def _row_cases(size: Size) -> list[Case]:
    cases = []
    for num_tokens in (256, 8192):
        tokens, hidden = min(num_tokens, size.max_tokens), min(4096, size.max_width)
        wide = min(14_336, size.max_width)

        def norm(device, tokens=tokens, hidden=hidden):  # noqa: ANN001, ANN202
            x = torch.randn(tokens, hidden, device=device).to(size.dtype)
            return (x, x.clone(), x[0].clone()), (1e-5,), 4 * x.nbytes

        def gate(device, tokens=tokens, wide=wide):  # noqa: ANN001, ANN202
            x = torch.randn(tokens, 2 * wide, device=device).to(size.dtype)
            return (x,), (), x.nbytes * 3 // 2

        def rotate(device, tokens=tokens):  # noqa: ANN001, ANN202
            model = _cut(LLAMA_8B, size)
            paged = paged_inputs(model, [tokens], device)
            heads = queries(model, tokens, device)
            key = heads[:, : model.num_kv_heads].contiguous()
            cos_sin = torch.randn(tokens, model.head_dim, device=device)
            places = torch.arange(tokens, device=device)
            caches = paged.key_cache, paged.value_cache
            given = heads, key, key.clone(), cos_sin, places, *caches, places
            return given, (), 2 * heads.nbytes + 4 * key.nbytes + cos_sin.nbytes

        cases += [
            _rows("add_rms_norm", f"{num_tokens}x4096", norm),
            _rows("silu_mul", f"{num_tokens}x14336", gate),
            _rows("rotary_store_kv", f"{num_tokens} tokens 32/8x128", rotate),
        ]
    cases += [*_quantized_linear_cases(size), *_grouped_linear_cases(size)]
    cases += _quantized_experts_cases(size)
    vocabulary = min(151_936, 4 * size.max_width)
    for num_seqs, text, k, p in (
        (1, "top_p 0.9", None, 0.9),
        (64, "top_p 0.9", None, 0.9),
        (64, "top_k 50", 50, 1.0),
        (256, "temperature", None, 1.0),
    ):

        def sample(device, num_seqs=num_seqs, k=k, p=p):  # noqa: ANN001, ANN202
            num_seqs = min(num_seqs, size.max_seqs)
            logits = torch.randn(num_seqs, vocabulary, device=device) * 4
            ones = torch.ones(num_seqs, device=device)
            ids = torch.arange(num_seqs, device=device)
            top_k = torch.full_like(ids, min(k or vocabulary, vocabulary))
            given = logits, ones, top_k, ones.double() * p, ones * 0, ids, ids
            return given, (), logits.nbytes

        cases.append(_rows("sample", f"{num_seqs}x151936 {text}", sample))
    for num_seqs in (1, 64, 256):

        def likeliest(device, num_seqs=num_seqs):  # noqa: ANN001, ANN202
            num_seqs = min(num_seqs, size.max_seqs)
            logits = torch.randn(num_seqs, vocabulary, device=device).to(size.dtype)
            return (logits,), (), logits.nbytes

        cases.append(_rows("greedy", f"{num_seqs}x151936", likeliest))
    return cases


def _grouped_linear_cases(size: Size) -> list[Case]:
    """Return cases of experts that have equally many rows; only the baselines are told so."""
    cases = []
    for text, num_groups, rows_of_each, shape in (
        ("8 experts, 1 token", 8, 1, (28_672, 4096)),
        ("8 experts, 64 tokens", 8, 16, (28_672, 4096)),
        ("128 experts, 64 tokens", 128, 4, (1536, 2048)),
        ("8 experts, 2048 tokens", 8, 512, (28_672, 4096)),
    ):
        num_out, num_in = (min(each, size.max_width) for each in shape)

        def prepare(
            device: torch.device,
            num_groups: int = num_groups,
            rows_of_each: int = rows_of_each,
            num_out: int = num_out,
            num_in: int = num_in,
        ) -> Prepared:
            rows_of_each = min(rows_of_each, size.max_tokens)
            num_rows = num_groups * rows_of_each
            weights = torch.randn(num_groups, num_out, num_in, device=device).to(size.dtype)
            x = torch.randn(num_rows, num_in, device=device).to(size.dtype)
            ends = torch.arange(1, num_groups + 1, device=device, dtype=torch.int32) * rows_of_each
            maps = GroupedMaps.of(list(weights))
            by_group = x.view(num_groups, rows_of_each, num_in)
            baselines: dict[str, Callable[[], Callable[[], object]]] = {
                "bmm": lambda: lambda: torch.bmm(by_group, weights.transpose(1, 2)).flatten(0, 1)
            }
            if device.type == "cuda" and hasattr(torch.nn.functional, "grouped_mm"):
                grouped_mm = torch.nn.functional.grouped_mm
                baselines["grouped_mm"] = lambda: (
                    lambda: grouped_mm(x, weights.transpose(1, 2), offs=ends)
                )
            return Prepared(
                lambda: launcher(reference.grouped_linear)(
                    x, maps, ends, None, None, num_rows, None
                ),
                weights.nbytes + x.nbytes + num_rows * num_out * x.itemsize,
                2 * num_rows * num_out * num_in,
                baselines,
                "bmm",
            )

        cases.append(Case("grouped_linear", text, prepare))
    return cases


def _quantized_linear_cases(size: Size) -> list[Case]:
    """Return products of so few rows that reading the weights is the limit."""
    num_in, num_out = min(4096, size.max_width), min(14_336, 2 * size.max_width)
    cases = []
    for num_rows in (1, 16, 64):
        for kind in ("int4", "int8", "fp8"):

            def multiply(device, num_rows=num_rows, kind=kind):  # noqa: ANN001, ANN202
                x = torch.randn(min(num_rows, size.max_tokens), num_in, device=device)
                x = x.to(size.dtype)
                groups = num_in // 32 if kind == "int4" else 1
                scales = torch.rand(groups, num_out, device=device) / 64
                offsets = None
                if kind == "int4":
                    values = torch.randint(0, 256, (num_in // 2, num_out), device=device)
                    values, scales = values.to(torch.uint8), scales.half()
                    offsets = -8 * scales
                elif kind == "int8":
                    values = torch.randint(-127, 128, (num_in, num_out), device=device)
                    values = values.to(torch.int8)
                else:
                    values = torch.randn(num_in, num_out, device=device).to(torch.float8_e4m3fn)
                given = x, values, scales, offsets, None
                read = values.nbytes + scales.nbytes * (1 if offsets is None else 2)
                return given, (), read + x.nbytes + 2 * len(x) * num_out

            cases.append(_rows("quantized_linear", f"{num_rows}x4096x14336 {kind}", multiply))
    return cases


def _quantized_experts_cases(size: Size) -> list[Case]:
    """Return cases of int4 experts that have equally many rows."""
    num_in, num_out = min(4096, size.max_width), min(28_672, 2 * size.max_width)
    cases = []
    for rows_of_each in (1, 16, 512):

        def multiply(device, rows_of_each=rows_of_each):  # noqa: ANN001, ANN202
            rows_of_each = min(rows_of_each, size.max_tokens)
            x = torch.randn(8 * rows_of_each, num_in, device=device).to(size.dtype)
            values = torch.randint(0, 256, (8, num_in // 2, num_out), device=device)
            values = values.to(torch.uint8)
            scales = torch.rand(8, num_in // 32, num_out, device=device).half() / 64
            ends = torch.arange(1, 9, device=device, dtype=torch.int32) * rows_of_each
            given, rest = (x, values, scales, -8 * scales, ends), (None, None, len(x))
            read = values.nbytes + 2 * scales.nbytes + x.nbytes
            return given, rest, read + len(x) * num_out * x.itemsize

        text = f"8 experts int4, {8 * rows_of_each} rows"
        cases.append(_rows("grouped_quantized_linear", text, multiply))
    return cases


def _block_cases(size: Size) -> list[Case]:
    cases = []
    for name, num_pieces, piece_bytes in (
        ("gather_blocks", 1, 2 * _MIB),
        ("scatter_blocks", 1, 2 * _MIB),
        ("gather_blocks", 64, 32 * 1024),
        ("scatter_blocks", 64, 32 * 1024),
    ):

        def blocks(device, num_pieces=num_pieces, piece_bytes=piece_bytes):  # noqa: ANN001, ANN202
            count, num_pieces = min(256, size.max_tokens // 4), min(num_pieces, size.max_width // 8)
            piece_bytes = min(piece_bytes, 16 * size.max_width)
            pool = torch.zeros(
                num_pieces, 2 * count, piece_bytes, dtype=torch.uint8, device=device
            ).transpose(0, 1)
            ids = torch.randperm(2 * count, device=device)[:count]
            staged = torch.zeros(count, num_pieces, piece_bytes, dtype=torch.uint8, device=device)
            return (pool, ids, staged), (), 2 * staged.nbytes

        text = f"256 blocks of {num_pieces}x{piece_bytes // 1024} KiB"
        cases.append(_rows(name, text, blocks))
    return cases
