"""Reads the tensors of a GGUF file, with the names and the order of rows that `transformers` uses.

A quantized matrix of a layer is not decoded when it is read: it stays in GGUF's blocks of quantized
weights. To say so, the tensor's name ends with the type of the blocks instead of "weight", as in
`model.layers.0.mlp.up_proj.Q4_K`. Other quantized tensors, such as the embedding, are decoded when
they are read.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from gpu_worker.weights.json_fields import ModelError
from gpu_worker.weights.stored.gguf_blocks import unpack_blocks
from gpu_worker.weights.tensor_file import Extent, OpenFile, Piece
from model_files.gguf_header import GgufTensor, read_header

_TOP: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYERS: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MIXTRAL: Final = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_QWEN: Final = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_GEMMA: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Of Gemma 2 and 3."""
_GEMMAS: Final = ("gemma", "gemma2", "gemma3")
_IN_CONFIG: Final = re.compile(r"rope_(freqs|factors_(long|short))\.weight")
"""Tensors whose values are in config.json."""
_LAYER: Final = re.compile(r"blk\.(\d+)\.(.+)")
_PLAIN: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a tensor of the file: all rows, or one expert's."""

    tensor: GgufTensor
    expert: int | None = None
    num_rotated_heads: int | None = None
    """Number of heads, if each head's rows are in the order of Llama's own rotary embedding: there
    the two rows of a rotated pair are neighbours. None: the rows are in the order of
    `transformers`."""
    has_one_more: bool = False
    """Whether the file's numbers are those of `transformers` plus 1."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape if self.expert is None else self.tensor.shape[1:]


class GgufFile:
    """The tensors of one file; see `TensorFile`."""

    def __init__(
        self,
        path: Path,
        heads: dict[str, int],
        names: Mapping[str, str],
        *,
        norms_have_one_more: bool = False,
    ) -> None:
        """Map the file.

        Args:
            path: The file.
            heads: Numbers of heads of "attn_q" and "attn_k", if their rows must be reordered: see
                `_Rows.num_rotated_heads`.
            names: Maps GGUF's names of a layer's tensors to the names in `transformers`. It has
                only the names that `_IN_LAYERS` lacks, or that differ in this architecture. In the
                name of an expert's tensor, `{}` stands for the expert's number.
            norms_have_one_more: See `_Rows.has_one_more`.

        Raises:
            ModelError: The file is damaged, or has a tensor that no supported architecture has.
        """
        self.path = path.resolve()
        self._bytes = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
        self._file = OpenFile(path)
        self._name_to_rows: dict[str, _Rows] = {}
        self._in_layers = {**_IN_LAYERS, **names}
        self._norms_have_one_more = norms_have_one_more
        for name, tensor in read_header(self.path).tensors.items():
            if not _IN_CONFIG.fullmatch(name):
                self._add(name, tensor, heads)

    @property
    def names(self) -> list[str]:
        return list(self._name_to_rows)

    def shape(self, name: str) -> tuple[int, ...]:
        rows = self._name_to_rows[name]
        return (rows.shape[0], rows.tensor.row_bytes) if _is_blocks(name, rows) else rows.shape

    def tensor(self, piece: Piece) -> torch.Tensor:
        rows = self._name_to_rows[piece.name]
        kind = rows.tensor.type
        raw = self._raw(rows)
        if len(rows.shape) > 1 and piece.where:
            raw = raw[piece.where[0]]
        if _is_blocks(piece.name, rows):
            return raw
        if kind.is_quantized:
            numbers = unpack_blocks(kind.name, raw).dequantized()
        else:
            numbers = raw.view(_PLAIN[kind.name])
        if len(rows.shape) == 1:
            numbers = numbers.flatten()
            if rows.has_one_more:
                numbers = numbers - 1
            return numbers[piece.where[0]] if piece.where else numbers
        return numbers[:, piece.where[1]] if len(piece.where) > 1 else numbers

    def extent(self, piece: Piece) -> Extent | None:
        rows = self._name_to_rows[piece.name]
        tensor = range(rows.tensor.start, rows.tensor.start + rows.tensor.num_bytes)
        if rows.expert is not None:
            num_bytes = len(tensor) // rows.tensor.shape[0]
            tensor = tensor[rows.expert * num_bytes : (rows.expert + 1) * num_bytes]
        # If rows are reordered, a part may need any of them.
        return self._file.extent(
            tensor, piece if rows.num_rotated_heads is None else replace(piece, where=())
        )

    def _raw(self, rows: _Rows) -> torch.Tensor:
        """Return the bytes of rows, uint8 `[N, bytes]`; a tensor of one dimension is one row."""
        tensor = rows.tensor
        raw = self._bytes[tensor.start : tensor.start + tensor.num_bytes].view(-1, tensor.row_bytes)
        if rows.expert is not None:
            num_rows = rows.shape[0]
            raw = raw[rows.expert * num_rows : (rows.expert + 1) * num_rows]
        if rows.num_rotated_heads is None:
            return raw
        if len(tensor.shape) == 1:  # a bias
            raw = raw.view(tensor.shape[0], -1)
        pairs = raw.view(rows.num_rotated_heads, -1, 2, raw.shape[1])
        return pairs.transpose(1, 2).reshape(-1, tensor.row_bytes)

    def _add(self, name: str, tensor: GgufTensor, heads: dict[str, int]) -> None:
        base, _, end = name.rpartition(".")
        in_layer = _LAYER.fullmatch(base)
        if in_layer is None:
            if base not in _TOP:
                raise ModelError(f"{self.path} has {name}, which is unknown")
            self._name_to_rows[f"{_TOP[base]}.{end}"] = _Rows(
                tensor, has_one_more=self._has_one_more(base)
            )
            return
        index, part = in_layer.groups()
        layer = f"model.layers.{index}"
        if part not in self._in_layers:
            raise ModelError(f"{self.path} has {name}, which is unknown")
        if end == "weight" and tensor.type.is_quantized:
            end = tensor.type.name
        in_layer_name = self._in_layers[part]
        if "{}" in in_layer_name:
            for expert in range(tensor.shape[0]):
                module = f"{layer}.{in_layer_name.format(expert)}"
                self._name_to_rows[f"{module}.{end}"] = _Rows(tensor, expert)
            return
        rows = _Rows(
            tensor,
            num_rotated_heads=heads.get(part),
            has_one_more=self._has_one_more(part),
        )
        self._name_to_rows[f"{layer}.{in_layer_name}.{end}"] = rows

    def _has_one_more(self, name: str) -> bool:
        return self._norms_have_one_more and name.endswith("norm")


def open_gguf_files(directory: Path) -> list[GgufFile]:
    """Return the GGUF files of `directory`, which `model_files` made; the list may be empty.

    Raises:
        ModelError: See `GgufFile`.
    """
    paths = sorted(directory.glob("*.gguf"))
    if not paths:
        return []
    metadata = read_header(paths[0].resolve()).metadata
    architecture = metadata.get("general.architecture")
    heads, names = {}, _QWEN
    if architecture in ("gemma2", "gemma3"):
        names = _GEMMA
    if architecture == "llama":
        names = _MIXTRAL
        # The converter permutes rows for a rotation of neighbouring pairs.
        num_heads = metadata["llama.attention.head_count"]
        num_kv_heads = metadata.get("llama.attention.head_count_kv", num_heads)
        heads = {"attn_q": num_heads, "attn_k": num_kv_heads}
    return [
        GgufFile(path, heads, names, norms_have_one_more=architecture in _GEMMAS) for path in paths
    ]


def _is_blocks(name: str, rows: _Rows) -> bool:
    return name.endswith(f".{rows.tensor.type.name}")
