import numpy as np
import pytest
import torch

from kernels import ops, reference
from kernels.triton.suppress import suppress as launcher
from tests.kernels.tensors import far_apart, strided

FIRST_64 = [-1, -1]  # the words that admit tokens 0 to 63


def each_op(test):
    ops_by_name = {"twin": reference.suppress, "op": ops.suppress, "launcher": launcher}
    return pytest.mark.parametrize("op", ops_by_name.values(), ids=ops_by_name.keys())(test)


def where(op, device):
    return "cpu" if op is ops.suppress else device


def int32(*words):
    return torch.tensor(words, dtype=torch.int32)


@each_op
@pytest.mark.parametrize("num_tokens", [1, 31, 32, 63, 4096, 3000, 40_001])
def test_tokens_that_are_not_admitted_get_minus_infinity_and_others_are_unchanged(
    op, num_tokens, device
):
    where_it_runs = where(op, device)
    logits = strided((7, num_tokens), torch.float32, where_it_runs)
    places = torch.tensor([5, 0, 2, 6])
    bits = np.random.default_rng(0).integers(0, 2, (4, -(-num_tokens // 32) * 32), np.uint8)
    admitted = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
    expected = logits.clone()
    for place, row in zip(places.tolist(), bits, strict=True):
        is_suppressed = torch.from_numpy(row[:num_tokens] == 0).to(where_it_runs)
        expected[place, is_suppressed] = -torch.inf
    op(logits, places.to(where_it_runs), admitted.to(where_it_runs))
    assert torch.equal(logits, expected)


@each_op
def test_a_logit_that_is_no_number_stays_so_where_it_is_admitted(op, device):
    where_it_runs = where(op, device)
    logits = torch.full((1, 64), torch.nan, device=where_it_runs)
    op(
        logits,
        torch.zeros(1, dtype=torch.int64).to(where_it_runs),
        int32([-1, 0]).to(where_it_runs),
    )
    assert logits[0, :32].isnan().all()
    assert logits[0, 32:].isneginf().all()


@each_op
def test_no_mask_changes_nothing(op, device):
    logits = torch.zeros(2, 64, device=where(op, device))
    none = torch.zeros(0, dtype=torch.int64, device=logits.device)
    op(logits, none, torch.zeros(0, 2, dtype=torch.int32, device=logits.device))
    assert not logits.any()


@each_op
def test_masks_of_far_apart_rows(op, device):
    logits = far_apart((3, 64), torch.float32, where(op, device))
    kept = logits[:2].clone()
    op(logits, torch.tensor([2], device=logits.device), int32([0, 0]).to(logits.device))
    assert logits[2].isneginf().all()
    assert torch.equal(logits[:2], kept)


@pytest.mark.parametrize("op", [ops.suppress, launcher], ids=["op", "launcher"])
def test_a_mismatch_is_named(op):
    logits, places, admitted = torch.zeros(2, 64), torch.tensor([1]), int32(FIRST_64)
    with pytest.raises(ValueError, match=r"logits has 1 dimensions, required are 2"):
        op(logits[0], places, admitted)
    with pytest.raises(ValueError, match=r"logits has dtype torch\.bfloat16"):
        op(logits.bfloat16(), places, admitted)
    with pytest.raises(ValueError, match=r"places has dtype torch\.int32"):
        op(logits, places.int(), admitted)
    with pytest.raises(ValueError, match=r"admitted has shape \(1, 1\); it must be \(1, 2\)"):
        op(logits, places, admitted[:, :1])
