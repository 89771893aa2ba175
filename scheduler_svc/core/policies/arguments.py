"""The arguments of policies: from the text that an operator writes, and their limits."""

import inspect
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any, get_type_hints


def split_arguments(texts: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Turn "name=value" texts into pairs, in an order that does not depend on the operator's.

    Raises:
        ValueError: One is not of that form, or a name comes twice.
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
    """Return `value`.

    Raises:
        ValueError: It is not finite and above 0.
    """
    if not (isfinite(value) and value > 0):
        raise ValueError(f"{name} is {value}; it must be a number above 0")
    return value


def read_arguments(policy: type[Any], args: Mapping[str, str]) -> dict[str, int | float | str]:
    """Turn those of `args` that a policy's constructor takes into the types that it declares.

    Raises:
        ValueError: A value is not of its type, or that type is neither int, float nor str.
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
