"""Turns the values of enums into words for people."""

from google.protobuf.descriptor import EnumDescriptor


def enum_word(enum: EnumDescriptor, number: int) -> str:
    """Return the last word of an enum value's name: "device" for KV_TIER_DEVICE."""
    name = enum.values_by_number.get(number)
    return f"unknown ({number})" if name is None else name.name.rpartition("_")[2].lower()
