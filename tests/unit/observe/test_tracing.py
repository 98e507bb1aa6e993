"""Trace context goes where messages go, and handlers run within spans of their own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Generator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any

import pytest

from domicile import ConfigError, Entity, HandlerFailed, Node, Rejection, Settings, connect, handler
from domicile.observe import tracing
from domicile.ports.trace import NoTracer, Tracer

QUICK = Settings(shards=4, settle_s=0.05, settle_max_s=0.1, linger_s=0.5)
STORE = "memory://tracing"


class No(Rejection, name="tracing.no"):
    """No."""


class Stop(Entity, name="stop"):
    @handler
    async def here(self) -> str:
        return self.id

    @handler
    async def via(self, other: str) -> str:
        await asyncio.sleep(0)
        return await self.ref(Stop, other).ask(Stop.here)

    @handler
    async def refuse(self) -> None:
        raise No("no")

    @handler
    async def fail(self) -> None:
        await asyncio.sleep(0)
        raise ValueError("broken")


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


@asynccontextmanager
async def served(tracer: Tracer | None) -> AsyncGenerator[Node]:
    """A node that serves all shards."""
    async with Node(STORE, entities=[Stop], settings=QUICK, tracer=tracer) as node:
        assert await node.ref(Stop, "warm").ask(Stop.here) == "warm"
        yield node


class Notes:
    """A tracer that only takes notes: a trace is the list of names on the way."""

    def __init__(self) -> None:
        self.now: ContextVar[str] = ContextVar("now", default="")
        self.spans: list[tuple[str, str]] = []

    def inject(self) -> str:
        """Where it comes from."""
        return self.now.get()

    @contextmanager
    def span(self, trace: str, name: str) -> Generator[None]:
        """Go on from there."""
        self.spans.append((trace, name))
        token = self.now.set(f"{trace}/{name}")
        try:
            yield
        finally:
            self.now.reset(token)


def test_handlers_go_on_from_where_their_message_came() -> None:
    async def test() -> None:
        notes = Notes()
        async with served(notes) as node, connect(STORE, tracer=notes, settings=QUICK) as client:
            notes.spans.clear()
            notes.now.set("shop")
            await client.ref(Stop, "a").ask(Stop.via, "b")
            await client.ref(Stop, "a").tell(Stop.here)
            await client.ref(Stop, "a").ask(Stop.here)
            notes.now.set("")
            await node.ref(Stop, "c").ask(Stop.here)
            assert sorted(notes.spans) == [
                ("", "stop.here"),
                ("shop", "stop.here"),
                ("shop", "stop.here"),
                ("shop", "stop.via"),
                ("shop/stop.via", "stop.here"),
            ]

    run(test())


def test_without_a_tracer_nothing_travels() -> None:
    async def test() -> None:
        notes = Notes()
        async with served(notes), connect(STORE, settings=QUICK) as client:
            notes.spans.clear()
            notes.now.set("shop")
            await client.ref(Stop, "a").ask(Stop.here)
            assert notes.spans == [("", "stop.here")]

    run(test())


def test_no_tracer_traces_nothing() -> None:
    with NoTracer().span(NoTracer().inject(), "x") as span:
        assert span is None


# OpenTelemetry


@contextmanager
def recording() -> Generator[tuple[tracing.OpenTelemetry, Any, Any]]:
    """A tracer, the exporter that gets its spans, and the SDK's own tracer for callers."""
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    provider = trace.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    try:
        yield tracing.OpenTelemetry(provider), exporter, provider.get_tracer("caller")
    finally:
        provider.shutdown()


def test_spans_of_opentelemetry_form_one_trace(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    async def test() -> None:
        with recording() as (tracer, exporter, caller):
            async with (
                served(tracer),
                connect(STORE, tracer=tracer, settings=QUICK) as client,
            ):
                exporter.clear()
                with caller.start_as_current_span("request"):
                    await client.ref(Stop, "a").ask(Stop.via, "b")
            inner, outer, request = exporter.get_finished_spans()
        assert (inner.name, outer.name, request.name) == ("stop.here", "stop.via", "request")
        assert outer.parent.span_id == request.context.span_id
        assert inner.parent.span_id == outer.context.span_id
        assert len({span.context.trace_id for span in (inner, outer, request)}) == 1
        assert outer.kind.name == "SERVER"
        assert outer.status.is_unset

    run(test())
    assert caplog.records == [], "a token that is detached elsewhere would be told"


def test_handlers_of_untraced_callers_begin_traces_of_their_own() -> None:
    async def test() -> None:
        with recording() as (tracer, exporter, _):
            async with served(tracer), connect(STORE, settings=QUICK) as client:
                exporter.clear()
                await client.ref(Stop, "a").ask(Stop.here)
                await client.ref(Stop, "b").ask(Stop.here)
            one, other = exporter.get_finished_spans()
        assert one.parent is None
        assert other.parent is None
        assert one.context.trace_id != other.context.trace_id

    run(test())


def test_a_failure_fails_its_span_and_a_rejection_does_not() -> None:
    async def test() -> None:
        with recording() as (tracer, exporter, _):
            async with served(tracer) as node:
                exporter.clear()
                with pytest.raises(No):
                    await node.ref(Stop, "a").ask(Stop.refuse)
                with pytest.raises(HandlerFailed):
                    await node.ref(Stop, "a").ask(Stop.fail)
            refused, failed = exporter.get_finished_spans()
        assert refused.status.is_unset
        assert failed.status.description == "ValueError"
        assert [event.name for event in failed.events] == ["exception"]

    run(test())


@pytest.mark.parametrize(
    "trace", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 999]
)
def test_a_trace_that_is_none_begins_a_new_one(trace: str) -> None:
    with recording() as (tracer, exporter, _):
        with tracer.span(trace, "x"):
            assert tracer.inject()
        assert tracer.inject() == ""
        (span,) = exporter.get_finished_spans()
        assert span.parent is None


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(tracing, "import_module", missing)
    with pytest.raises(ConfigError, match=r"domicile\[otel\]"):
        tracing.OpenTelemetry()
