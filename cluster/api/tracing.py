"""OpenTelemetry spans of HTTP calls, made when they are over, from durations.

One span per call; below it one per output, and below that `queue`, `prefill` (with its chunks
if there were several) and `decode`. The engine sends durations, not timestamps, so everything is
laid out from the moment that the call came, by this process's clock. Attributes are named as
in OpenTelemetry's conventions for HTTP and for generative AI where these have a name.
"""

import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import (
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from cluster.api.exchange import Exchange
from cluster.frontend.requests import LiveOutput, LiveRequest

EXPORT_TIMEOUT_S = 3
"""For one delivery, so that a collector that is gone does not hold up our end for long."""

UNTRACED = {"/health", "/ready", "/metrics", "/version"}
"""Probes and scrapes."""


def provider_to(endpoint: str) -> TracerProvider:
    """Sends spans to a collector (OTLP over HTTP), in batches, from a thread of its own.

    Args:
        endpoint: a URL; without a path it gets the usual one.
    """
    if urlsplit(endpoint).path in ("", "/"):
        endpoint = f"{endpoint.rstrip('/')}/v1/traces"
    provider = TracerProvider(
        resource=Resource.create({SERVICE_NAME: "stoker", SERVICE_VERSION: version("stoker")})
    )
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class CallTracer:
    """Observes exchanges, and hands their spans to a provider."""

    def __init__(
        self,
        provider: TracerProvider,
        *,
        model: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
        time_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """
        Args:
            model: its name, at the time of asking.
            clock: of exchanges and live requests.
            time_ns: time of day, in nanoseconds.
        """
        self._provider = provider
        self._tracer = provider.get_tracer("stoker")
        self._propagator = TraceContextTextMapPropagator()
        self._model, self._clock, self._time_ns = model, clock, time_ns

    def observe(self, exchange: Exchange) -> None:
        """A call is over."""
        if exchange.route in UNTRACED:
            return
        began_ns = self._time_ns() - int(self._clock() * 1e9)
        layout = _Layout(self._tracer, began_ns)
        parent = self._propagator.extract(exchange.trace_headers)
        span = layout.begin(
            f"{exchange.method} {exchange.route or 'unknown'}",
            exchange.began_s,
            parent,
            {
                "http.request.method": exchange.method,
                "http.route": exchange.route,
                "http.response.status_code": exchange.status,
                "client.address": exchange.client,
                "stoker.request_id": exchange.request_id,
            },
            kind=SpanKind.SERVER,
        )
        if exchange.status == 0 or exchange.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        for live in exchange.call.requests if exchange.call else ():
            for output in live.outputs:
                self._trace_output(layout, live, output, set_span_in_context(span))
        layout.end(span, exchange.ended_s)

    def _trace_output(
        self, layout: "_Layout", live: LiveRequest, output: LiveOutput, parent: Context
    ) -> None:
        began_s = live.submitted_s
        ended_s = output.arrivals_s[-1] if output.arrivals_s else self._clock()
        sampling = live.draft.sampling
        span = layout.begin(
            f"generate {self._model()}",
            began_s,
            parent,
            {
                "gen_ai.request.model": self._model(),
                "gen_ai.request.max_tokens": sampling.max_tokens or 0,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.usage.input_tokens": live.draft.num_prompt,
                "gen_ai.usage.output_tokens": len(output.token_ids),
                "gen_ai.response.finish_reasons": (output.finish.name.lower(),),
                "stoker.output": output.index,
                "stoker.cached_tokens": output.num_cached_tokens,
                "stoker.preemptions": output.num_preemptions,
            },
        )
        if live.failure is not None:
            span.set_status(Status(StatusCode.ERROR, str(live.failure)))
        inside = set_span_in_context(span)
        if output.arrivals_s:
            started_s = began_s + output.queue_s
            layout.add("queue", began_s, started_s, inside, {})
            self._trace_prefill(layout, live, output, started_s, inside)
            layout.add(
                "decode",
                started_s + output.prefill_s,
                ended_s,
                inside,
                {"stoker.tokens": len(output.token_ids) - 1},
            )
        else:
            layout.add("queue", began_s, ended_s, inside, {})
        layout.end(span, ended_s)

    def _trace_prefill(
        self,
        layout: "_Layout",
        live: LiveRequest,
        output: LiveOutput,
        started_s: float,
        inside: Context,
    ) -> None:
        attributes = {
            "stoker.tokens": live.draft.num_prompt - output.num_cached_tokens,
            "stoker.cached_tokens": output.num_cached_tokens,
            "stoker.chunks": max(1, len(output.chunks)),
        }
        span = layout.begin("prefill", started_s, inside, attributes)
        at_s = started_s
        for number, (tokens, seconds) in enumerate(output.chunks):
            layout.add(
                "prefill chunk",
                at_s,
                at_s + seconds,
                set_span_in_context(span),
                {"stoker.tokens": tokens, "stoker.chunk": number},
            )
            at_s += seconds
        layout.end(span, started_s + output.prefill_s)

    def close(self) -> None:
        """Send what is not sent yet. Takes up to `EXPORT_TIMEOUT_S` and a bit."""
        self._provider.shutdown()


class _Layout:
    """Spans of one call, from times by the server's clock to times of day."""

    def __init__(self, tracer: Tracer, zero_ns: int) -> None:
        self._tracer, self._zero_ns = tracer, zero_ns

    def begin(
        self,
        name: str,
        at_s: float,
        parent: Context,
        attributes: Mapping[str, AttributeValue],
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        return self._tracer.start_span(name, parent, kind, attributes, start_time=self._ns(at_s))

    def end(self, span: Span, at_s: float) -> None:
        span.end(self._ns(at_s))

    def add(
        self,
        name: str,
        begin_s: float,
        end_s: float,
        parent: Context,
        attributes: Mapping[str, AttributeValue],
    ) -> None:
        self.end(self.begin(name, begin_s, parent, attributes), max(begin_s, end_s))

    def _ns(self, at_s: float) -> int:
        return self._zero_ns + int(at_s * 1e9)
