"""The part of a model that each rank holds."""

from dataclasses import replace

import pytest

from gpu_worker.models.experts.config import ExpertsConfig, split_experts
from gpu_worker.models.registry import open_model
from gpu_worker.ranks.shards import Place
from gpu_worker.weights.json_fields import ModelError
from tests.models_fixture import make_model


def places(tensor_size, pipeline_size):
    return [Place(rank, tensor_size, pipeline_size) for rank in range(tensor_size * pipeline_size)]


def test_a_process_on_its_own_has_all():
    alone = Place()
    assert alone.is_first_stage
    assert alone.is_last_stage
    assert alone.layers(7) == range(7)
    assert alone.groups(3) == alone.vocabulary(3) == range(3)


def test_rank_0_is_where_tokens_are_sampled():
    assert [place.stage for place in places(2, 3)] == [2, 2, 1, 1, 0, 0]
    assert [place.tensor_rank for place in places(2, 3)] == [0, 1, 0, 1, 0, 1]


def test_hidden_states_go_from_stage_to_stage_at_one_tensor_rank():
    for place in places(2, 3):
        if not place.is_last_stage:
            after = Place(place.next_rank, 2, 3)
            assert (after.stage, after.tensor_rank) == (place.stage + 1, place.tensor_rank)
            assert after.previous_rank == place.rank


@pytest.mark.parametrize(("num_layers", "num_stages"), [(3, 3), (7, 2), (32, 5)])
def test_stages_have_all_layers_once(num_layers, num_stages):
    parts = [place.layers(num_layers) for place in reversed(places(1, num_stages))]
    assert [layer for part in parts for layer in part] == list(range(num_layers))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_ranks_have_all_heads_once():
    assert [place.groups(8) for place in places(4, 1)] == [
        *(range(2), range(2, 4), range(4, 6), range(6, 8))
    ]


def test_kv_heads_fewer_than_ranks_stay_with_their_query_heads():
    assert [place.groups(2) for place in places(4, 1)] == [
        *(range(1), range(1), range(1, 2), range(1, 2))
    ]


def test_the_vocabulary_is_padded_at_its_end_alone():
    parts = [place.vocabulary(10) for place in places(4, 1)]
    assert parts == [range(3), range(3, 6), range(6, 9), range(9, 10)]


EXPERTS = ExpertsConfig(
    layers=(True, False),
    num_experts=5,
    num_per_token=2,
    intermediate_size=64,
    has_shares_of_one=True,
    shared_size=96,
    has_shared_gate=True,
)


def test_each_rank_has_a_part_of_every_expert_and_of_the_shared_one():
    for place in places(2, 1):
        part = split_experts(EXPERTS, place)
        assert part == replace(EXPERTS, intermediate_size=32, shared_size=48)


@pytest.mark.parametrize(
    ("tensor_size", "problem"),
    [
        (3, "tensor-parallel-size is 3; it must divide moe_intermediate_size, 64"),
        (64, "tensor-parallel-size is 64; it must divide shared_expert_intermediate_size, 96"),
    ],
)
def test_experts_that_ranks_cannot_share_are_refused_by_name(tensor_size, problem):
    with pytest.raises(ModelError) as error:
        split_experts(EXPERTS, Place(tensor_size=tensor_size))
    assert str(error.value) == problem


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "llama"
    return make_model(directory, "llama", hidden_size=96, num_attention_heads=6)


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ((4, 1), "tensor-parallel-size is 4; it must divide num_attention_heads, 6"),
        ((1, 3), "pipeline-parallel-size is 3; the model has 2 layers, and each stage needs one"),
        ((6, 1), "tensor-parallel-size is 6; it must divide intermediate_size, 112"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_by_name(model, sizes, problem):
    with pytest.raises(ModelError) as error:
        open_model(model, place=Place(0, *sizes))
    assert str(error.value) == problem


def test_kv_heads_that_fit_neither_way_are_refused(tmp_path):
    sizes = {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 6}
    model = make_model(tmp_path / "llama", "llama", **sizes)
    with pytest.raises(ModelError, match="must divide num_key_value_heads, 6, or be a multiple"):
        open_model(model, place=Place(0, 4, 1))


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_models_of_transformers_are_refused(model, sizes):
    with pytest.raises(ModelError, match=r"size is 2; Llama.* runs on one device only"):
        open_model(model, "transformers", place=Place(0, *sizes))
