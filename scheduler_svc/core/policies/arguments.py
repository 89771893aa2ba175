"""Parses and checks the arguments that --policy-arg gives to a scheduling policy."""

import inspect
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any, get_type_hints


def split_arguments(texts: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Parse "name=value" texts; return pairs of name and value, sorted by name.

    Raises:
        ValueError: A text does not have this form, or a name occurs twice.
    """
    pairs = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise ValueError(f"--policy-arg: {text}: must be name=value")
        pairs.append((name, value))
    names = [name for name, _ in pairs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"--policy-arg: gives {', '.join(sorted(twice))} twice")
    return tuple(sorted(pairs))


def check_positive(name: str, value: float) -> float:
    """Return `value` if it is finite and positive.

    Raises:
        ValueError: `value` is not finite or not positive.
    """
    if not (isfinite(value) and value > 0):
        raise ValueError(f"{name} is {value}; it must be a number above 0")
    return value


def read_arguments(policy: type[Any], args: Mapping[str, str]) -> dict[str, int | float | str]:
    """Convert the arguments that the policy's constructor declares to their types; skip the others.

    Raises:
        ValueError: A value cannot be converted, or its declared type is not int, float or str.
    """
    hints = get_type_hints(policy.__init__)
    values: dict[str, int | float | str] = {}
    for name, text in args.items():
        if name not in inspect.signature(policy).parameters:
            continue
        kind = hints.get(name)
        if kind not in (int, float, str):
            raise ValueError(
                f"{policy.__name__} declares {name} as {kind}; it must be int, float or str"
            )
        try:
            values[name] = kind(text)
        except ValueError:
            raise ValueError(f"{name} is {text!r}; it must be of type {kind.__name__}") from None
    return values
