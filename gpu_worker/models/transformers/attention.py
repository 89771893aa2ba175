"""Finds out how a model of `transformers` attends, by running it once without weights.

Symbols: `T` tokens, `H` query heads, `HKV` kv heads, `D` head dim.
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.distributions import Distribution
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from contract.worker_limits import Chunk, KvWindow, window_length
from gpu_worker.models.transformers.own_attention import (
    ALIBI_DIM,
    has_own_attention,
    use_interface,
)
from gpu_worker.models.transformers.recurrent import RecurrentLayer, StateRecorder, cache_name
from gpu_worker.weights.json_fields import ModelError

MaskFunction = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | bool
]
"""A mask of transformers. Its four arguments are tensors of indexes: of batches, heads, queries and
keys. It returns, for each element of these tensors, whether the query sees the key."""


def read_window(sees: MaskFunction, num_positions: int) -> int | None:
    """Return a mask's window: the number of tokens that a token sees, including itself.

    None: a token sees all earlier tokens. `num_positions` may be large, because the mask is
    computed for only a few queries.

    Raises:
        ModelError: The mask is neither causal nor a sliding window, or depends on the tokens.
    """
    positions = torch.arange(num_positions, device="cpu")
    zero = torch.zeros((), dtype=torch.int64, device="cpu")
    last = num_positions - 1
    window: int | None = None
    for query in (last, max(0, last - 1), last // 2, 0):
        try:
            seen = torch.as_tensor(sees(zero, zero, positions[query], positions), device="cpu")
            visible = seen.expand(num_positions)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise ModelError(f"its masks depend on the tokens: {error}") from error
        if query == last:
            num_visible = int(visible.sum())
            window = num_visible if num_visible < num_positions else None
        first = 0 if window is None else max(0, query - window + 1)
        if not torch.equal(visible, (positions >= first) & (positions <= query)):
            raise ModelError("its masks are neither causal nor a sliding window")
    return window


_numbers = count()

CHUNKED: Final = "chunked_attention"
"""The type of layers in which a token sees only tokens of its chunk."""
_NUM_TOKENS: Final = 3
_OWN_ATTENTION: Final = "its attention does not go through transformers' attention interface"

_WITHOUT_EFFECT: Final = frozenset(
    {
        "cache_position",
        "head_mask",
        "is_causal",  # checked separately
        "layer_idx",
        "output_attentions",
        "output_hidden_states",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Arguments that models pass to attention, and that Quire's attention ignores."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's call of attention."""

    layer: int
    num_kv_heads: int
    head_dim: int
    """The head dim of keys; values may have fewer dimensions."""
    window: KvWindow
    """None: a token sees all earlier tokens."""
    source: int
    """The layer whose keys and values this layer reads: itself, or an earlier one."""
    has_alibi: bool = False
    """Whether the keys hold ALiBi's biases."""


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Options of attention; see `attend`."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    """float32[H]."""
    alibi_slopes: torch.Tensor | None = None
    """[H]; see `with_alibi`."""
    alibi_weight: float = 1.0


def register_attention(function: Any) -> str:
    """Register `function` as an attention of transformers; return the name that selects it.

    `function` takes the attention module, query `[1, H, T, D]`, key and value `[1, HKV, T, D]`, a
    mask, and options by name. It returns `[1, T, H, D]` and None. The mask is None, because
    transformers makes no mask for an attention that it does not know.
    """
    name = f"quire_{next(_numbers)}"
    AttentionInterface.register(name, function)
    return name


def forget_attention(name: str) -> None:
    """Unregister an attention."""
    AttentionInterface._global_mapping.pop(name, None)  # noqa: SLF001 - it has no method for that


def read_options(query: torch.Tensor, given: dict[str, Any]) -> AttentionOptions:
    """Read the options from the keyword arguments that a model passes to attention."""
    scale, sinks = given.get("scaling"), given.get("s_aux")
    return AttentionOptions(
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        window=given.get("sliding_window"),
        softcap=given.get("softcap"),
        sinks=None if sinks is None else sinks.detach().flatten().float(),
        alibi_slopes=given.get("alibi_slopes"),
        alibi_weight=given.get("alibi_weight", 1.0),
    )


def base_name(causal: Any) -> str:
    """Return the name of a causal model's attribute that holds the model without its head.

    Raises:
        ModelError: There is no such attribute.
    """
    prefix = causal.base_model_prefix
    if isinstance(getattr(causal, prefix, None), PreTrainedModel):
        return str(prefix)
    # Some text models that also exist within larger models use the prefix of the larger ones.
    children = causal.named_children()
    names = [str(name) for name, child in children if isinstance(child, PreTrainedModel)]
    if len(names) != 1:
        raise ModelError("its model without the head cannot be found")
    return names[0]


class ObservedPass(NamedTuple):
    """What `record_calls` has found out about a model in one forward pass."""

    calls: tuple[AttentionCall, ...]
    """One call for each layer that attends, in the order of the layers."""
    recurrent: tuple[RecurrentLayer, ...]
    first_position: int
    """The position that the model gives a sequence's first token."""


_EXPERTS_TAKE: Final = ["hidden_states", "top_k_index", "top_k_weights"]


def _skip_experts(model: nn.Module) -> None:
    """Make modules of experts return zeros instead of computing.

    Otherwise some of these modules, such as LongCat's, would fail on the meta device: they read the
    contents of `top_k_index`, and tensors on the meta device have no contents.
    """
    for module in model.modules():
        if list(inspect.signature(module.forward).parameters) == _EXPERTS_TAKE:
            module.forward = lambda hidden, *_: torch.zeros_like(hidden)


def record_calls(
    config: PreTrainedConfig, max_model_len: int, *, is_recurrent: bool = False
) -> ObservedPass:
    """Find out how a model attends, by running it once.

    The model is built on the meta device, where tensors have shapes but no contents. `read_window`
    checks the model's masks for sequences of `max_model_len` tokens.

    Args:
        config: The model's config.
        max_model_len: The longest sequence, in tokens.
        is_recurrent: Whether the model has recurrent layers, which need not attend.

    Raises:
        ModelError: The model attends in a way that paged attention does not support, or a layer
            does not attend exactly once. The message does not name the model.
    """
    recorder = _Recorder(max_model_len, config)
    config = copy.deepcopy(config)
    for rope in batch_dependent_ropes(config):
        rope["rope_type"] = "default"  # other types read the values of positions
    name = register_attention(recorder.attend)
    # A bfloat16 model shows which states are float32 in a model of any dtype.
    dtype = {"dtype": torch.bfloat16} if is_recurrent else {}
    states: StateRecorder | None = None
    has_own = has_own_attention(config)
    if not has_own:  # models with their own attention have no windows in masks
        AttentionMaskInterface.register(name, recorder.mask)
    try:
        with torch.device("meta"), torch.inference_mode(), _unchecked_distributions():
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config,
                attn_implementation="eager" if has_own else name,
                experts_implementation="batched_mm",
                **dtype,
            ).eval()
            if has_own:
                use_interface(model, name)
            _skip_experts(model)
            base = getattr(model, base_name(model))
            states = StateRecorder(config, base) if is_recurrent else None
            cache = cache_name(base) or "past_key_values"
            tokens = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64)
            with nullcontext() if states is None else states.watch():
                base(
                    input_ids=tokens,
                    position_ids=tokens,
                    # Without an attention mask or a cache, transformers looks for several
                    # sequences in `position_ids`.
                    attention_mask=None if is_recurrent else torch.ones_like(tokens),
                    use_cache=is_recurrent,
                    **{cache: states},
                )
    except ModelError:
        raise
    except Exception as error:  # the model's code may raise anything
        if error.args == (name,):  # the model has its own table of attentions
            raise ModelError(_OWN_ATTENTION) from error
        why = str(error)
        if "meta" in why:  # torch's message does not mention the model
            why = "its code reads the contents of tensors, or chooses their device"
        raise ModelError(f"its shapes cannot be determined without weights: {why}") from error
    layers = sorted(call.layer for call in recorder.calls)
    if not layers and not (states and states.layers_by_module):
        raise ModelError(_OWN_ATTENTION)
    if states is not None:
        if layers != sorted(states.attending):
            raise ModelError(_OWN_ATTENTION)
    elif layers != list(range(config.num_hidden_layers)):
        raise ModelError(
            f"it has {config.num_hidden_layers} layers, of which these attend: {layers}; each layer"
            " must attend once"
        )
    calls = tuple(sorted(recorder.calls, key=lambda call: call.layer))
    calls = _with_windows_of_masks(config, calls, recorder.mask_windows)
    recurrent = () if states is None else tuple(states.layers_by_module.values())
    return ObservedPass(calls, recurrent, _first_position(base))


def _first_position(base: torch.nn.Module) -> int:
    """Return the position that the model gives a sequence's first token.

    This position is the padding token's id plus one if the model numbers positions like RoBERTa,
    otherwise 0.
    """
    for module in base.modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            padding: Any = module.padding_idx
            return int(padding) + 1
    return 0


@contextmanager
def _unchecked_distributions() -> Iterator[None]:
    """Turn off the checks of `torch.distributions`: meta tensors have no values to check."""
    before = Distribution._validate_args  # noqa: SLF001 - there is only a setter
    Distribution.set_default_validate_args(value=False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(value=before)


def _with_windows_of_masks(
    config: PreTrainedConfig, calls: tuple[AttentionCall, ...], mask_windows: set[int | None]
) -> tuple[AttentionCall, ...]:
    """Add the mask's window to each call of attention that passed no window itself.

    Layers of Qwen2-MoE, for example, pass a window only in their mask. A model may make masks for
    kinds of layers that it does not have, so unused masks are allowed.

    Raises:
        ModelError: It is not clear which mask a layer uses.
    """
    layer_types = getattr(config, "layer_types", None)
    windows = mask_windows - {None}
    found = []
    for call in calls:
        is_sliding = layer_types is not None and layer_types[call.layer] == "sliding_attention"
        if call.window is None and len(windows) == 1 and (is_sliding or None not in mask_windows):
            found.append(replace(call, window=min(window for window in windows if window)))
            continue
        is_unasked = bool(mask_windows) and call.window not in mask_windows
        if not isinstance(call.window, Chunk) and (
            is_unasked or (is_sliding and windows and call.window is None)
        ):
            raise ModelError(
                f"layer {call.layer} asks attention for window {call.window}, but its masks are"
                f" for {sorted(mask_windows, key=str)}"
            )
        found.append(call)
    return tuple(found)


class _Recorder:
    """Stands in for attention and masks: records how the model calls them, and computes nothing."""

    def __init__(self, max_model_len: int, config: PreTrainedConfig) -> None:
        self.calls: list[AttentionCall] = []
        self.mask_windows: set[int | None] = set()
        self._kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._max_model_len = max_model_len
        types = getattr(config, "layer_types", None) or ()
        self._chunked = {layer for layer, name in enumerate(types) if name == CHUNKED}
        self._chunk: int | None = config.attention_chunk_size if self._chunked else None

    def mask(
        self, *_: Any, mask_function: MaskFunction, local_size: int | None = None, **__: Any
    ) -> None:
        if self._chunk is not None and local_size == self._chunk:
            return  # this mask depends on padding, and Quire's batches have none
        self.mask_windows.add(read_window(mask_function, self._max_model_len))

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,  # positional or keyword argument
        **given: Any,
    ) -> tuple[torch.Tensor, None]:
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            raise ModelError(f"{type(module).__name__} has no layer_idx")
        _refuse_other_attention(f"layer {layer}", module, query, key, value, attention_mask, given)
        options = read_options(query, given)
        window: KvWindow = options.window
        if layer in self._chunked and self._chunk is not None:
            if window is not None:
                raise ModelError(f"layer {layer} has both chunks and a window of {window}")
            window = Chunk(self._chunk)
        length = window_length(window)
        if length is not None and length >= self._max_model_len:
            window = None
        # A layer that shares keys and values gets the same tensors.
        source = next((each for each, (k, v) in self._kv.items() if k is key and v is value), layer)
        self._kv.setdefault(layer, (key, value))
        head_dim = key.shape[3] + (0 if options.alibi_slopes is None else ALIBI_DIM)
        self.calls.append(
            AttentionCall(
                layer,
                key.shape[1],
                head_dim,
                window,
                source,
                has_alibi=options.alibi_slopes is not None,
            )
        )
        _, num_heads, num_tokens, _ = query.shape
        return query.new_empty(1, num_tokens, num_heads, value.shape[3]), None


def _refuse_other_attention(
    layer: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    given: dict[str, Any],
) -> None:
    if mask is not None:
        raise ModelError(f"{layer} adds a mask or bias of its own to the scores")
    if not given.get("is_causal", getattr(module, "is_causal", True)):
        raise ModelError(f"{layer} is not causal")
    if not query.shape[2] == key.shape[2] == value.shape[2] == _NUM_TOKENS:
        raise ModelError(f"{layer} attends to something other than the tokens before")
    if not query.shape[3] == key.shape[3] >= value.shape[3]:
        raise ModelError(
            f"{layer} has head dims {query.shape[3]}, {key.shape[3]} and {value.shape[3]} of"
            " query, key and value"
        )
    if key.shape[1] != value.shape[1] or query.shape[1] % key.shape[1]:
        raise ModelError(
            f"{layer} has {query.shape[1]}, {key.shape[1]} and {value.shape[1]} heads of query,"
            " key and value"
        )
    if given.get("alibi_slopes") is not None and key.shape[1] != query.shape[1]:
        raise ModelError(f"{layer} has ALiBi with kv heads that several query heads share")
    known = _WITHOUT_EFFECT | {
        "scaling",
        "sliding_window",
        "softcap",
        "s_aux",
        "dropout",
        "alibi_slopes",
        "alibi_weight",
    }
    for name in given.keys() - known:
        if given[name] is not None:
            raise ModelError(f"{layer} asks attention for {name}, which is not supported")


def batch_dependent_ropes(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the parameters of the rotary embeddings whose angles depend on the whole batch.

    The longest sequence of a batch changes these angles for all sequences of the batch.
    """
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict):
        return []
    by_layer_type = [rope for rope in parameters.values() if isinstance(rope, dict)]
    ropes = by_layer_type if "rope_type" not in parameters else [parameters]
    return [rope for rope in ropes if rope.get("rope_type") in ("dynamic", "longrope")]
