"""The error tree: every failure answers "did it run?" (I9)."""

from __future__ import annotations

import inspect
import re

import pytest

import domicile
from domicile import errors
from domicile.errors import (
    ConfigError,
    DomicileError,
    HandlerFailed,
    MaybeExecuted,
    NotExecuted,
    Rejection,
)


def tree() -> dict[str, str]:
    """Child to parent, as drawn in the module's docstring."""
    assert errors.__doc__ is not None
    parents: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in errors.__doc__.splitlines():
        found = re.match(r"^([ │├└─]*)([A-Z]\w+)(?=\s|$)", line)
        if found is None or not (found[1].strip() or found[2] == "DomicileError"):
            continue
        depth, name = len(found[1]), found[2]
        while above and above[-1][0] >= depth:
            above.pop()
        if above:
            parents[name] = above[-1][1]
        above.append((depth, name))
    return parents


def test_the_drawn_tree_is_the_real_one() -> None:
    real = {
        name: cls.__bases__[0].__name__
        for name, cls in vars(errors).items()
        if inspect.isclass(cls) and issubclass(cls, DomicileError) and cls is not DomicileError
    }
    assert tree() == real


@pytest.mark.parametrize("name", sorted(tree()))
def test_every_error_is_documented(name: str) -> None:
    assert getattr(errors, name).__doc__


def test_users_can_catch_each_answer_apart() -> None:
    answers = (NotExecuted, MaybeExecuted, HandlerFailed, Rejection)
    for one in answers:
        assert issubclass(one, DomicileError)
        assert not any(issubclass(one, other) for other in answers if other is not one)


def test_what_users_catch_is_public() -> None:
    internal = {"StoreError", "StoreUnavailable", "StoreRewound", "WatchCompacted"}
    assert set(tree()) - internal <= set(domicile.__all__)


def test_a_wrong_setting_is_a_value_error_too() -> None:
    assert issubclass(ConfigError, ValueError)


def test_a_rejection_is_known_by_its_name() -> None:
    class ClosedShop(Rejection): ...

    class Broke(Rejection, name="bank.broke"): ...

    assert ClosedShop.wire_name == "test_a_rejection_is_known_by_its_name.<locals>.ClosedShop"
    assert Rejection.registry[ClosedShop.wire_name] is ClosedShop
    assert Broke.wire_name == "bank.broke"
    assert Rejection.registry["bank.broke"] is Broke
    assert Broke(3, "euros").args == (3, "euros")


def test_a_subclass_of_a_rejection_has_a_name_of_its_own() -> None:
    class Closed(Rejection, name="shop.closed"): ...

    class ClosedForGood(Closed): ...

    assert ClosedForGood.wire_name.endswith("ClosedForGood")
    assert Rejection.registry["shop.closed"] is Closed
