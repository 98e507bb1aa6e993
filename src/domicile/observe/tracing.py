"""Trace context by OpenTelemetry, for `Node(tracer=OpenTelemetry())`: needs `domicile[otel]`.

Uses the API alone: the SDK that the program sets up decides which spans are kept and where they go.
A handler's span is a child of the span that sent the message, over any number of processes. It must
never raise into a message's path.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any

from domicile.errors import ConfigError, Rejection

MAX_TRACE_LETTERS = 64
"""Characters that are accepted. A W3C traceparent has 55; a longer text came from no tracer."""

_FIELD = "traceparent"


class OpenTelemetry:
    """Implements `domicile.ports.trace.Tracer` with the global tracer provider, or a given one."""

    def __init__(self, provider: Any = None) -> None:
        try:
            trace: Any = import_module("opentelemetry.trace")
            context: Any = import_module("opentelemetry.context")
            propagation: Any = import_module("opentelemetry.trace.propagation.tracecontext")
        except ImportError as error:
            raise ConfigError(
                "OpenTelemetry is not installed here: pip install 'domicile[otel]'"
            ) from error
        self._trace = trace
        # An empty context: what a worker did before must not become the parent of a span.
        self._nothing = context.Context()
        self._tracer = trace.get_tracer("domicile", tracer_provider=provider)
        self._propagator = propagation.TraceContextTextMapPropagator()

    def inject(self) -> str:
        """As `Tracer.inject`."""
        if not self._trace.get_current_span().get_span_context().is_valid:
            return ""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier)
        return carrier.get(_FIELD, "")

    def span(self, trace: str, name: str) -> AbstractContextManager[object]:
        """As `Tracer.span`: of kind SERVER; failed if the handler raises no `Rejection`."""
        parent = self._nothing
        if trace and len(trace) <= MAX_TRACE_LETTERS:
            parent = self._propagator.extract({_FIELD: trace}, context=parent)
        return self._within(parent, name)

    @contextmanager
    def _within(self, parent: Any, name: str) -> Generator[object]:
        with self._tracer.start_as_current_span(
            name,
            context=parent,
            kind=self._trace.SpanKind.SERVER,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield span
            except Rejection:
                raise
            except BaseException as error:
                span.record_exception(error)
                span.set_status(self._trace.StatusCode.ERROR, type(error).__name__)
                raise
