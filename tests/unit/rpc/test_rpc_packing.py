import numpy as np
import pytest

from contract.codec.packing import pack_int32, pack_uint64, unpack_int32, unpack_uint64
from contract.errors import InvalidArgumentError


def test_int32_is_little_endian_twos_complement():
    assert pack_int32([1, -2]) == b"\x01\x00\x00\x00\xfe\xff\xff\xff"


def test_uint64_is_little_endian():
    assert pack_uint64([2**64 - 2]) == b"\xfe" + b"\xff" * 7


@pytest.mark.parametrize("values", [[], [0], [2**31 - 1, -(2**31), 7]])
def test_int32_comes_back(values):
    unpacked = unpack_int32(pack_int32(values), "field")
    assert unpacked.dtype == np.int32
    assert unpacked.tolist() == values


@pytest.mark.parametrize("values", [[], [0], [2**64 - 1, 2**63, 7]])
def test_uint64_comes_back(values):
    unpacked = unpack_uint64(pack_uint64(values), "field")
    assert unpacked.dtype == np.uint64
    assert unpacked.tolist() == values


def test_arrays_of_other_types_strides_and_byte_orders_pack_alike():
    expected = pack_int32([1, 2, 3])
    assert pack_int32(np.array([1, 2, 3], dtype=np.int64)) == expected
    assert pack_int32(np.array([1, 2, 3], dtype=">i4")) == expected
    assert pack_int32(np.array([1, 9, 2, 9, 3, 9], dtype=np.int32)[::2]) == expected


def test_an_array_value_out_of_range_is_refused_not_wrapped():
    with pytest.raises(OverflowError):
        pack_int32(np.array([2**31], dtype=np.int64))
    with pytest.raises(OverflowError):
        pack_int32([2**31])
    with pytest.raises(OverflowError):
        pack_uint64(np.array([-1], dtype=np.int64))
    with pytest.raises(OverflowError):
        pack_uint64([-1])


def test_unpacking_shares_the_memory_and_cannot_write_it():
    unpacked = unpack_int32(pack_int32([1]), "field")
    assert not unpacked.flags.owndata
    assert not unpacked.flags.writeable


@pytest.mark.parametrize(
    ("unpack", "size", "multiple"), [(unpack_int32, 5, 4), (unpack_uint64, 12, 8)]
)
def test_a_torn_field_is_named(unpack, size, multiple):
    with pytest.raises(InvalidArgumentError, match=f"^tokens has {size} bytes.*{multiple}$") as it:
        unpack(bytes(size), "tokens")
    assert it.value.field == "tokens"
