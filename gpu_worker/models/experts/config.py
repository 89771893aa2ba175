"""Reads mixtures of experts from config.json. Needs no torch.

The outputs of a token's experts are added, each multiplied by the expert's *share*.
"""

from dataclasses import dataclass, replace
from enum import Enum

from gpu_worker.ranks.shards import Place
from gpu_worker.weights.json_fields import JsonFields


class Routing(Enum):
    """How experts are scored and chosen.

    If experts are in groups, a token's experts come from the groups with the highest scores.
    """

    SOFTMAX = "softmax"
    """An expert's score is its softmax probability; a group's score is its best expert's score."""
    SIGMOID = "sigmoid"
    """As in DeepSeek V3: an expert's score is its sigmoid plus a bias; the score of a group is the
    sum of the scores of its two best experts."""


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names of a layer's experts in a checkpoint."""

    module: str = "mlp"
    """The module that contains `gate`, which is the router, and `experts`."""
    maps: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """The gate, up and down maps of each expert."""
    shared: str = "shared_experts"
    """The shared expert in the module. If this expert's share of the sum depends on the token,
    a map computes the share. The name of this map is `shared` with `_gate` appended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Experts that a router chooses for each token, and perhaps a shared one for every token."""

    layers: tuple[bool, ...]
    """By layer: whether it has experts."""
    num_experts: int
    num_per_token: int
    intermediate_size: int
    """MLP size of each expert."""
    has_shares_of_one: bool
    """Whether the shares of a token's experts are made to sum to 1, before `share_factor` applies.
    """
    share_factor: float = 1.0
    routing: Routing = Routing.SOFTMAX
    num_groups: int = 1
    """A divisor of `num_experts`."""
    num_chosen_groups: int = 1
    """Number of groups from which the experts of one token come."""
    shared_size: int | None = None
    """MLP size of the shared expert; None: there is none."""
    has_shared_gate: bool = False
    """Whether the shared expert's share depends on the token; otherwise the share is 1."""
    names: ExpertNames = ExpertNames()


def read_mixtral_experts(fields: JsonFields, num_layers: int) -> ExpertsConfig:
    """Read the experts of Mixtral.

    Raises:
        ModelError: A field is missing or malformed, or asks for more experts than there are.
    """
    name = "num_local_experts"
    num_experts = fields.positive_int(name, default=8)
    return ExpertsConfig(
        layers=(True,) * num_layers,
        num_experts=num_experts,
        num_per_token=_num_per_token(fields, name, num_experts, default=2),
        intermediate_size=fields.positive_int("intermediate_size"),
        has_shares_of_one=True,
        names=ExpertNames("block_sparse_moe", ("w1", "w3", "w2")),
    )


def read_gpt_oss_experts(fields: JsonFields, num_layers: int) -> ExpertsConfig:
    """Read the experts of gpt-oss.

    Raises:
        ModelError: A field is missing or malformed, or asks for more experts than there are.
    """
    name = "num_local_experts"
    num_experts = fields.positive_int(name, default=128)
    return ExpertsConfig(
        layers=(True,) * num_layers,
        num_experts=num_experts,
        num_per_token=_num_per_token(fields, name, num_experts, default=4),
        intermediate_size=fields.positive_int("intermediate_size"),
        has_shares_of_one=True,
    )


def read_qwen_experts(
    fields: JsonFields,
    num_layers: int,
    *,
    has_shared: bool = False,
    size_field: str = "moe_intermediate_size",
) -> ExpertsConfig:
    """Read the experts of Qwen and OLMoE.

    Args:
        fields: The fields of config.json.
        num_layers: Number of layers.
        has_shared: Whether there is a shared expert. Its share of a token's result depends on the
            token.
        size_field: The field with the MLP size of each expert.

    Raises:
        ModelError: A field is missing or malformed, or asks for more experts than there are.
    """
    # transformers 5 writes Qwen3's under the second name.
    name = "num_experts" if fields.has("num_experts") else "num_local_experts"
    num_experts = fields.positive_int(name)
    step = fields.positive_int("decoder_sparse_step", default=1)
    dense = fields.int_list("mlp_only_layers")
    return ExpertsConfig(
        layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
        num_experts=num_experts,
        num_per_token=_num_per_token(fields, name, num_experts),
        intermediate_size=fields.positive_int(size_field),
        has_shares_of_one=fields.boolean("norm_topk_prob", default=False),
        shared_size=fields.positive_int("shared_expert_intermediate_size") if has_shared else None,
        has_shared_gate=has_shared,
        names=ExpertNames(shared="shared_expert"),
    )


def read_grouped_experts(
    fields: JsonFields,
    num_layers: int,
    *,
    routing: Routing,
    num_dense: int,
    reads_layer_types: bool = False,
) -> ExpertsConfig | None:
    """Read the experts of DeepSeek and GLM; None if no layer has any.

    Args:
        fields: The fields of config.json.
        num_layers: Number of layers.
        routing: The family's routing.
        num_dense: How many layers at the beginning have no experts, if config.json does not say.
        reads_layer_types: Whether `mlp_layer_types`, if set, names the layers with experts.

    Raises:
        ModelError: A field is missing, malformed, or asks for something unsupported.
    """
    layers = _layers_after_dense(fields, num_layers, num_dense, reads_layer_types=reads_layer_types)
    if not any(layers):
        return None
    fields.allow_only("scoring_func", routing.value)
    num_experts = fields.positive_int("n_routed_experts")
    num_per_token = fields.positive_int("num_experts_per_tok")
    num_groups = num_chosen_groups = 1
    method = fields.get("topk_method", default="greedy")
    if routing is Routing.SIGMOID or method == "group_limited_greedy":
        num_groups = fields.positive_int("n_group")
        num_chosen_groups = fields.positive_int("topk_group")
    elif method != "greedy":
        supported = "greedy, group_limited_greedy"
        raise fields.unsupported("topk_method", f"is {method!r}; supported: {supported}")
    if num_experts % num_groups:
        raise fields.error("n_group", f"is {num_groups}; it must divide the {num_experts} experts")
    if num_chosen_groups > num_groups:
        raise fields.error("topk_group", f"is {num_chosen_groups}; n_group is {num_groups}")
    num_open = num_experts // num_groups * num_chosen_groups
    if num_per_token > num_open:
        raise fields.error(
            "num_experts_per_tok", f"is {num_per_token}; a token can choose among {num_open}"
        )
    size = fields.positive_int("moe_intermediate_size")
    return ExpertsConfig(
        layers=layers,
        num_experts=num_experts,
        num_per_token=num_per_token,
        intermediate_size=size,
        # For V2, transformers ignores the field, and the shares need not sum to 1.
        has_shares_of_one=routing is Routing.SIGMOID
        and fields.boolean("norm_topk_prob", default=True),
        share_factor=fields.number("routed_scaling_factor"),
        routing=routing,
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        # Shared experts are one MLP that is as wide as all of them.
        shared_size=size * fields.positive_int("n_shared_experts"),
    )


def split_experts(config: ExpertsConfig, place: Place) -> ExpertsConfig:
    """Return the config of one rank's part of each expert.

    Raises:
        ModelError: The experts cannot be split among the ranks.
    """
    size = len(place.share("moe_intermediate_size", config.intermediate_size))
    shared_size = config.shared_size
    if shared_size is not None:
        shared_size = len(place.share("shared_expert_intermediate_size", shared_size))
    return replace(config, intermediate_size=size, shared_size=shared_size)


def _num_per_token(
    fields: JsonFields, of: str, num_experts: int, default: int | None = None
) -> int:
    num_per_token = fields.positive_int("num_experts_per_tok", default=default)
    if num_per_token > num_experts:
        raise fields.error(
            "num_experts_per_tok", f"is {num_per_token}; it must be at most {of}, {num_experts}"
        )
    return num_per_token


def _layers_after_dense(
    fields: JsonFields, num_layers: int, num_dense: int, *, reads_layer_types: bool
) -> tuple[bool, ...]:
    """Read which layers have experts: those in `mlp_layer_types`, or all but the first layers."""
    fields.allow_only("moe_layer_freq", 1)
    kinds = fields.get("mlp_layer_types")
    if reads_layer_types and kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise fields.error("mlp_layer_types", f"must be a list of {num_layers} names")
        unknown = [kind for kind in kinds if kind not in ("dense", "sparse")]
        if unknown:
            raise fields.error("mlp_layer_types", f"has {unknown[0]!r}; known are dense and sparse")
        return tuple(kind == "sparse" for kind in kinds)
    first = fields.get("first_k_dense_replace", default=num_dense)
    if not isinstance(first, int) or first < 0:
        raise fields.error("first_k_dense_replace", f"is {first!r}; it must be 0 or more")
    return tuple(layer >= first for layer in range(num_layers))
