import numpy as np
import pytest
import torch

from gpu_worker.memory.transfer import packed_bytes, upload, upload_into

CPU = torch.device("cpu")
ARRAYS = [
    np.arange(5, dtype=np.int64),
    np.array([[1, 2, 3], [4, 5, 6]], np.int32),
    np.zeros((0, 7), np.int32),
    np.array([0.25]),
    np.array([True, False, True]),
    np.arange(24, dtype=np.float32).reshape(4, 6)[::2, 1:4],
]


def into_a_buffer(arrays, device):
    return upload_into(torch.zeros(packed_bytes(arrays), dtype=torch.uint8, device=device), arrays)


@pytest.mark.parametrize("send", [upload, into_a_buffer])
def test_received_contents_equal_those_sent(send):
    tensors = send(ARRAYS, CPU)
    for tensor, array in zip(tensors, ARRAYS, strict=True):
        assert tensor.dtype == torch.from_numpy(array.copy()).dtype
        assert np.array_equal(tensor.numpy(), array)


def test_arrays_that_travel_together_are_aligned_copies():
    tensors = into_a_buffer(ARRAYS, CPU)
    assert all(tensor.storage_offset() * tensor.element_size() % 16 == 0 for tensor in tensors)
    tensors[0][0] = 99
    assert ARRAYS[0][0] == 0


def test_a_buffer_is_filled_again_where_it_was():
    buffer = torch.zeros(packed_bytes(ARRAYS), dtype=torch.uint8)
    before = upload_into(buffer, ARRAYS)
    upload_into(buffer, [ARRAYS[0] + 1, ARRAYS[1][::-1]])
    assert before[0].tolist() == [1, 2, 3, 4, 5]
    assert before[1].tolist() == [[4, 5, 6], [1, 2, 3]]
    assert before[3].tolist() == [0.25], "what lies behind is left as it is"


@pytest.mark.gpu
def test_arrays_arrive_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    tensors = upload(ARRAYS, torch.device("cuda"))
    for tensor, array in zip(tensors, ARRAYS, strict=True):
        assert np.array_equal(tensor.cpu().numpy(), array)
