"""Finds each kernel's configuration on a device: tile sizes, splits and warps.

`configs/` has a JSON file for each device on which `python -m kernels.tuning` was run, named after
the device. For other devices, `configs/` has files for compute capabilities, such as `sm_90.json`.
The field `tuned` describes how a file's numbers were measured; null means that they were chosen,
not measured. The numbers for Triton's interpreter are small, so that the short sequences of tests
have several tiles and splits.

A file has a list of rules for each kernel; the first rule that matches decides. A rule may match
only properties of the model (`LaunchShape`), not of the batch. A configuration changes the order of
sums, so a rule that matched the batch would make a sequence's result depend on other sequences.
"""

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import torch

CONFIG_DIR: Final = Path(__file__).parent / "configs"
_NO_DEVICE_PROCESSORS: Final = 2  # for the interpreter, which more programs would slow down


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """The properties of a launch that follow from the model; rules may match these."""

    dtype: str
    """The dtype of the queries: "float32", "float16" or "bfloat16"."""
    stored: str
    """The dtype of the caches: that of the queries, "int8" or "float8_e4m3fn"."""
    dims: int
    """The head dim of values, rounded up to a power of two and at least 16."""
    group: int
    """Query heads per kv head."""
    divides_values: bool = True
    """Whether programs can divide the dims of values among them. This is possible if the head dim
    is a power of two and the attention is not latent."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How decode attention divides its work; the first four fields affect a result's last bits."""

    positions: int
    """KV positions in a tile: a power of two, at least 16."""
    split: int
    """KV positions in a split: a multiple of `positions`."""
    pieces_per_processor: int
    """The limit on pieces of work (pairs of split and kv head) of one sequence, per processor (SM)
    of the device. If a sequence would have more pieces, its splits grow."""
    num_warps: int
    num_stages: int
    """Tiles that are loaded at the same time."""
    programs_per_processor: int
    """Number of programs in the grid for each processor of the device."""


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """How prefill attention divides its work."""

    rows: int
    """Rows in a tile: a power of two, at least 16. Each row is one query head of one token."""
    positions: int
    """KV positions in a tile: a power of two, at least 16."""
    num_warps: int
    num_stages: int
    """Tiles that are loaded at the same time."""
    value_dims: int = 256
    """The limit on the dims of values that one program computes: a power of two. If
    `LaunchShape.divides_values` is false, there is no limit, and one program computes all dims."""


Config = TypeVar("Config", DecodeConfig, PrefillConfig)


def config_of(kind: type[Config], device: torch.device, shape: LaunchShape) -> Config:
    """Return a kernel's configuration for `shape` on `device`, or the one set by `forced`."""
    if kind in _forced:
        return cast(Config, _forced[kind])
    index = None
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
    return cast(Config, _config_of(NAMES[kind], index, shape))


@contextmanager
def forced(config: DecodeConfig | PrefillConfig) -> Iterator[None]:
    """Within the context, a kernel uses `config` for all its launches; not thread-safe.

    The type of `config` says which kernel: the one for decode or for prefill attention.
    Measurements and tests use this context.
    """
    _forced[type(config)] = config
    try:
        yield
    finally:
        del _forced[type(config)]


def shape_of(query: torch.Tensor, value_cache: torch.Tensor) -> LaunchShape:
    """Return the shape of a launch with `query` [T, H, ...] and `value_cache` [B, P, HKV, D]."""
    num_heads, head_dim = query.shape[1], value_cache.shape[3]
    dims = max(16, 1 << (head_dim - 1).bit_length())
    return LaunchShape(
        dtype=str(query.dtype).removeprefix("torch."),
        stored=str(value_cache.dtype).removeprefix("torch."),
        dims=dims,
        group=num_heads // value_cache.shape[2],
        divides_values=query.shape[2] == head_dim == dims,
    )


@functools.cache
def num_processors(device: torch.device) -> int:
    """Return the number of processors (SMs) of `device`; without a GPU, a small number."""
    if device.type != "cuda":
        return _NO_DEVICE_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def read_rules(kind: type[Config], text: str) -> list[tuple[dict[str, object], Config]]:
    """Return a file's rules for `kind`: for each rule, the fields to match and the configuration.

    Raises:
        ValueError: a rule matches a field that `LaunchShape` does not have, or a configuration does
            not have the fields of `kind`, or one of its values is not a positive integer.
    """
    rules = []
    for rule in json.loads(text)["kernels"][NAMES[kind]]:
        unknown = set(rule["match"]) - {field.name for field in fields(LaunchShape)}
        if unknown:
            raise ValueError(f"match has {sorted(unknown)}, which no shape has")
        rules.append((rule["match"], _parsed(kind, rule["config"])))
    return rules


def config_path(device_name: str, capability: tuple[int, int]) -> Path:
    """Return the device's own file or, if there is none, the file for its compute capability.

    If no file has this capability, the file for the next lower capability is used. If there are
    only files for higher capabilities, the file for the lowest is used.
    """
    own = CONFIG_DIR / f"{file_stem(device_name)}.json"
    if own.exists():
        return own
    known = sorted(_capability(path) for path in CONFIG_DIR.glob("sm_*.json"))
    number = capability[0] * 10 + capability[1]
    fits = [each for each in known if each <= number]
    return CONFIG_DIR / f"sm_{fits[-1] if fits else known[0]}.json"


def file_stem(device_name: str) -> str:
    """Return the name of a device's file without ".json": "NVIDIA H200" gives "NVIDIA_H200"."""
    return "".join(each if each.isalnum() or each == "-" else "_" for each in device_name)


NAMES: Final[dict[type[DecodeConfig] | type[PrefillConfig], str]] = {
    DecodeConfig: "decode",
    PrefillConfig: "prefill",
}
"""The names that the kernels have in the files."""


_forced: Final[dict[type[DecodeConfig] | type[PrefillConfig], DecodeConfig | PrefillConfig]] = {}


@functools.cache
def _config_of(name: str, index: int | None, shape: LaunchShape) -> DecodeConfig | PrefillConfig:
    text = _device_path(index).read_text()
    if name == NAMES[DecodeConfig]:
        return first_match(read_rules(DecodeConfig, text), shape)
    return first_match(read_rules(PrefillConfig, text), shape)


def _device_path(index: int | None) -> Path:
    if index is None:
        return CONFIG_DIR / "interpreter.json"
    name = torch.cuda.get_device_name(index)
    return config_path(name, torch.cuda.get_device_capability(index))


def first_match(rules: list[tuple[dict[str, object], Config]], shape: LaunchShape) -> Config:
    """Return the configuration of the first rule that matches `shape`.

    Raises:
        ValueError: no rule matches.
    """
    for match, config in rules:
        if all(getattr(shape, name) == value for name, value in match.items()):
            return config
    raise ValueError(f"no rule matches {shape}; the last rule must match every shape")


def _capability(path: Path) -> int:
    return int(path.stem.removeprefix("sm_"))


def _parsed(kind: type[Config], given: dict[str, Any]) -> Config:
    known = {field.name for field in fields(kind)}
    required = {field.name for field in fields(kind) if field.default is MISSING}
    if not required <= set(given) <= known:
        raise ValueError(f"config has {sorted(given)}, required are {sorted(required)}")
    for name, value in given.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")
    return kind(**given)
