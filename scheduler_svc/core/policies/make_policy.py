"""Makes the policy that the configuration names."""

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

from scheduler_svc.core.policies.arguments import read_arguments
from scheduler_svc.core.policies.combined import Combined
from scheduler_svc.core.policies.deadline import EarliestDeadline
from scheduler_svc.core.policies.fair import TenantFair
from scheduler_svc.core.policies.fcfs import Fcfs
from scheduler_svc.core.policies.policy import Policy
from scheduler_svc.core.policies.priority import Priority

_CRITERIA: dict[str, type[Policy]] = {
    "priority": Priority,
    "fair": TenantFair,
    "deadline": EarliestDeadline,
}
"""Policies that can be combined with "+", in the order in which a combination must name them."""


def make_policy(name: str, args: Iterable[tuple[str, str]]) -> Policy:
    """Make a policy.

    Args:
        name: One of fcfs, priority, fair and deadline; or several of the last three, in this order
            and joined by "+"; or the dotted path of a subclass of `Policy`.
        args: Pairs of name and value, for the constructor. In a combination, each policy gets the
            arguments that it declares.

    Raises:
        ValueError: There is no such policy, or it does not accept these arguments.
    """
    texts = dict(args)
    if name == "fcfs":
        return _construct(Fcfs, texts)
    if "." in name:
        return _construct(_import_policy(name), texts)
    parts = name.split("+")
    if parts != [part for part in _CRITERIA if part in parts]:
        raise ValueError(
            f"policy is {name!r}; it must be fcfs, {', '.join(_CRITERIA)}, several of the last "
            f"{len(_CRITERIA)} in this order such as {'+'.join(_CRITERIA)}, or the dotted path of "
            "a class"
        )
    if len(parts) == 1:
        return _construct(_CRITERIA[name], texts)
    return _combine(parts, texts)


def _combine(parts: list[str], texts: Mapping[str, str]) -> Policy:
    made: dict[str, Any] = {}
    used: set[str] = set()
    for part in parts:
        values = read_arguments(_CRITERIA[part], texts)
        made[part] = _CRITERIA[part](**values)
        used |= values.keys()
    _refuse_unused("+".join(parts), texts, used)
    return Combined(made.get("priority"), made.get("fair"), made.get("deadline"))


def _construct(policy: type[Policy], texts: Mapping[str, str]) -> Policy:
    values = read_arguments(policy, texts)
    _refuse_unused(policy.__name__, texts, values.keys())
    try:
        return policy(**values)
    except TypeError as error:  # a required argument is missing
        raise ValueError(f"{policy.__name__}: {error}") from error


def _refuse_unused(name: str, texts: Mapping[str, str], used: Iterable[str]) -> None:
    if unused := sorted(texts.keys() - set(used)):
        raise ValueError(f"policy {name} takes no argument {unused[0]!r}")


def _import_policy(path: str) -> type[Policy]:
    module_name, _, class_name = path.rpartition(".")
    try:
        found = getattr(import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"policy is {path!r}; it cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ValueError(  # noqa: TRY004 # it is the name that is wrong
            f"policy is {path!r}; it must be a subclass of {Policy.__module__}.Policy"
        )
    return found
