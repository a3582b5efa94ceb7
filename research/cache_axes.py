"""The cache axes by their names: the product of placements, storages and policies of retention.

Every parameter of an axis value is an axis of its own, by the name of its field. A parameter that a
point does not use is no part of it, and equal points come once.
"""

import contextlib
import dataclasses
import functools
import importlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from kvlab.ops.retention import POLICIES, Retention
from kvlab.ops.specs import (
    RETENTIONS,
    CacheSpec,
    Contiguous,
    Kivi4,
    Paged,
    Recompute,
    Ring,
    parse_placement,
)

_T = TypeVar("_T")

SPEC_CLASSES = (CacheSpec, Paged, Contiguous, Recompute, Ring, Kivi4, *POLICIES.values())
"""What a manifest may name as the type of a part of a spec."""

_AXES = ("placement", "storage", "retention")
_NEEDED_BY = {"page_size": "placement=paged", "window": "placement=ring"}
_NEEDED_BY |= dict.fromkeys(("storage", "retention"), "a placement that stores keys and values")
_NEEDED_BY |= {"group": "storage=kivi4", "residual": "storage=kivi4"}


def cache_specs(
    axes: Mapping[str, Sequence[Any]], left_out: list[str] | None = None
) -> list[CacheSpec]:
    """The product of the cache axes, in the order given.

    Args:
      axes: values by name: `placement`, `storage`, `retention` (names), and any parameter of
        theirs (`page_size`, `window`, `group`, `residual`, and the fields of policies). What is
        absent has its default: paged, float32, all.
      left_out: takes the reason of every impossible combination of a product, which is then no
        point of it; None lets the first one raise.

    Returns:
      The points. `recompute` stores nothing, so beside other placements it is one point whatever
      the other axes are.

    Raises:
      ValueError: an unknown name, an impossible value or combination, or a parameter that no point
        uses. The message names a legal neighbour.
    """
    given = {name: tuple(values) for name, values in axes.items()}
    used: set[str] = set()

    def choices(parameters: Sequence[str]) -> Iterator[dict[str, Any]]:
        names = [name for name in parameters if name in given]
        used.update(names)
        for values in itertools.product(*(given[name] for name in names)):
            yield dict(zip(names, values, strict=True))

    placements = []
    for name in given.get("placement", ("paged",)):
        needed = {"paged": ("page_size",), "ring": ("window",)}.get(name, ())
        for chosen in choices(needed):
            page_size = chosen.get("page_size", Paged().page_size)
            placements.append(parse_placement(name, page_size, chosen.get("window")))
    storages: list[str | Kivi4] = []
    for name in given.get("storage", ("float32",)):
        if name == "kivi4":
            storages += [Kivi4(**chosen) for chosen in choices(("group", "residual"))]
        else:
            storages.append(name)
    policies = _policies(given.get("retention", ("all",)), choices, left_out)
    if all(placement == Recompute() for placement in placements):
        idle = {"storage": ("float32",), "retention": ("all",)}
        used |= {"placement"} | {name for name in idle if given.get(name, idle[name]) == idle[name]}
    else:
        used |= {*_AXES}
    for name in given.keys() - used:
        user = _NEEDED_BY.get(name) or _policy_with(name)
        raise ValueError(f"{name}={given[name][0]} given, but no point uses it; it needs {user}")
    points: list[CacheSpec] = []
    for point in itertools.product(placements, storages, policies):
        arguments = point[:1] if point[0] == Recompute() else point
        points += _possible(functools.partial(CacheSpec, *arguments), left_out)
    if not points and left_out:
        raise ValueError(left_out[0])
    return list(dict.fromkeys(points))


def _policies(
    names: Sequence[str],
    choices: Callable[[Sequence[str]], Iterator[dict[str, Any]]],
    left_out: list[str] | None,
) -> list[Retention | None]:
    """The policies of these names, with every choice of their parameters."""
    policies: list[Retention | None] = []
    for name in names:
        policy = load_policy(name)
        if policy is None:
            policies.append(None)
            continue
        fields = [field.name for field in dataclasses.fields(policy) if field.name != "seed"]
        for chosen in choices(fields):
            policies += _possible(functools.partial(policy, **chosen), left_out)
    return policies


def _possible(make: Callable[[], _T], left_out: list[str] | None) -> list[_T]:
    """What was made, or nothing where that is impossible, with the reason in `left_out`."""
    try:
        return [make()]
    except ValueError as error:
        if left_out is None:
            raise
        left_out.append(str(error))
        return []


def _policy_with(parameter: str) -> str:
    """A policy that has a parameter, as the command line names it."""
    for name, policy in POLICIES.items():
        if parameter in {field.name for field in dataclasses.fields(policy)}:
            return f"retention={name}"
    return "a retention that has it"


def load_policy(name: str) -> type[Retention] | None:
    """Finds a policy of retention.

    Args:
      name: one of `RETENTIONS`, or `module:Class` for one from outside; the module is looked for
        in the working folder too.

    Returns:
      The class; None for `all`.

    Raises:
      ValueError: an unknown name, a module that cannot be imported, a class that is no policy.
    """
    if name == "all":
        return None
    if name in POLICIES:
        return POLICIES[name]
    module_name, colon, class_name = name.partition(":")
    if not colon:
        raise ValueError(
            f"retention={name!r} is not known; legal values: {', '.join(RETENTIONS)}, or "
            "module:Class for a policy of your own"
        )
    try:
        with _working_folder_on_path():
            policy = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:
        raise ValueError(f"retention={name} cannot be imported: {error!r}") from error
    if not (isinstance(policy, type) and issubclass(policy, Retention)):
        raise ValueError(
            f"retention={name} is no policy; it must be a class derived from "
            "kvlab.ops.retention.Retention"
        )
    return policy


@contextlib.contextmanager
def _working_folder_on_path() -> Iterator[None]:
    """Lets a module beside the user be found, as `python -m` does and a console script does not."""
    folder = os.getcwd()
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def classes_named(value: Any) -> dict[str, type]:
    """The classes that a manifest's spec may need: kvlab's, and the policies it names from outside.

    Raises:
      ValueError: a policy that cannot be imported.
    """
    classes: dict[str, type] = {cls.__name__: cls for cls in SPEC_CLASSES}
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            name = part.get("type")
            if isinstance(name, str) and ":" in name:
                policy = load_policy(name)
                assert policy is not None
                classes[name] = policy
            waiting += part.values()
        elif isinstance(part, list | tuple):
            waiting += part
    return classes
