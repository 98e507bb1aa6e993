"""`@simulated`: an async test that runs in a whole cluster, once for every seed.

A failing seed is named, `DOMICILE_SEED=<n>` runs just that one, and its timeline is written to a
file. After each run the history is judged by the checkers, so a test fails on a broken invariant
that it did not look for.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from domicile.core.placement.strategies import Strategy
from domicile.entity.model.entity import Entity
from domicile.errors import ConfigError
from domicile.settings import Settings
from domicile.testing.checkers import Violation, check
from domicile.testing.sim.cluster import Sim
from domicile.testing.sim.failure import Repeat

# Pytest shows the lines of a test, not those that run it; `--full-trace` shows all.
__tracebackhide__ = True

P = ParamSpec("P")
T = TypeVar("T")


class InvariantBroken(AssertionError):
    """The history of a run breaks a rule. `violations` has all that were found."""

    violations: Sequence[Violation] = ()


class Decorator(Protocol):
    """What `simulated(...)` returns: takes `test(sim, ...)` or a method `test(self, sim, ...)`."""

    @overload
    def __call__(
        self, test: Callable[Concatenate[Sim, P], Coroutine[Any, Any, None]], /
    ) -> Callable[P, None]: ...
    @overload
    def __call__(
        self, test: Callable[Concatenate[T, Sim, P], Coroutine[Any, Any, None]], /
    ) -> Callable[Concatenate[T, P], None]: ...


def run_simulation(sim: Sim, body: Callable[[Sim], Coroutine[Any, Any, None]]) -> None:
    """One whole run: start, body, verdict. Raises the error of the body or of a checker."""

    async def main() -> None:
        async with sim:
            await body(sim)

    try:
        sim.world.run(main(), sim.loop)
        judge(sim)
    finally:
        sim.close()


def judge(sim: Sim) -> None:
    """Raise `InvariantBroken` if the checkers object, or the first error that no code caught."""
    violations = check(sim.history)
    if violations:
        broken = InvariantBroken("\n".join(str(violation) for violation in violations[:5]))
        broken.violations = violations
        raise broken
    if sim.history.counts["leader.failed"]:
        raise AssertionError("a coordinator failed; the log says on what")
    for process, context in sim.world.errors:
        error = context.get("exception")
        message = f"{process or 'network'}: {context.get('message', 'an error nobody caught')}"
        raise AssertionError(message) from error


def simulated(
    *,
    entities: Sequence[type[Entity]],
    nodes: int = 3,
    seeds: int = 20,
    settings: Settings | None = None,
    resources: Callable[[], AbstractAsyncContextManager[Mapping[type[Any], Any]]] | None = None,
    candidates: Sequence[int] | None = None,
    managers: int = 0,
    strategy: str | Strategy = "least_shards",
    rough: bool = False,
    locks: bool = False,
    homes: Mapping[int, Sequence[type[Entity]]] | None = None,
) -> Decorator:
    """Run an async test in a simulated cluster of `nodes`, with seeds 0 … `seeds` - 1.

    With `nodes=0` there is only a client at first, and the test adds nodes.
    The parameter named `sim` (else the first) gets the cluster; the others stay pytest fixtures.
    Works on methods too. `rough=True` adds small seeded faults all the time: broken connections,
    broken watches, lost replies of the store, uneven delays. With `locks=True` crashes are proved
    at once, as on the embedded store; without it leases have to run out. `candidates` are the nodes
    that may coordinate. `managers` are processes that do nothing else, numbered after the nodes.
    `strategy` is the coordinator's; `settings` and `resources` are those of every node. `homes`
    names, by node number, the entities of nodes that cannot be home to all.
    """

    if nodes < 0 or seeds < 1:
        raise ConfigError(
            f"seeds={seeds} must be at least 1, or nothing is run, and nodes={nodes} at least 0"
        )

    def decorate(test: Callable[..., Coroutine[Any, Any, None]], /) -> Callable[..., None]:
        if not inspect.iscoroutinefunction(test):
            raise TypeError(f"a simulated test must be an `async def` function, not {test!r}")
        signature = inspect.signature(test)
        name = _sim_parameter(signature)
        repeat = Repeat(test)

        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            bound = rest.bind(*args, **kwargs)
            for seed in _seeds(seeds):
                sim = Sim(
                    seed,
                    entities=entities,
                    nodes=nodes,
                    settings=settings,
                    resources=resources,
                    candidates=candidates,
                    managers=managers,
                    strategy=strategy,
                    rough=rough,
                    locks=locks,
                    homes=homes,
                )

                async def body(sim: Sim) -> None:
                    given = {**bound.arguments, name: sim}
                    await test(**given)

                try:
                    run_simulation(sim, body)
                except BaseException as error:
                    found = error.violations if isinstance(error, InvariantBroken) else ()
                    repeat.explain(error, seed, sim.history, found)
                    raise

        rest = signature.replace(
            parameters=[p for p in signature.parameters.values() if p.name != name]
        )
        run.__signature__ = rest  # type: ignore[attr-defined]
        del run.__wrapped__
        return run

    return decorate


def _sim_parameter(signature: inspect.Signature) -> str:
    names = list(signature.parameters)
    if "sim" in names:
        return "sim"
    for name in names:
        if name != "self":
            return name
    raise TypeError("a simulated test needs a parameter for the cluster, such as `sim: Sim`")


def _seeds(count: int) -> Sequence[int]:
    alone = os.environ.get("DOMICILE_SEED")
    if alone is None:
        return range(count)
    if not alone.isdecimal():
        raise ConfigError(f"DOMICILE_SEED={alone!r} must be the number of one seed")
    return (int(alone),)
