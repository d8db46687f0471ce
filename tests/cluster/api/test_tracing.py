"""Spans of calls: what they say, when they begin and end, whose trace they belong to."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cluster.api.tracing import CallTracer, provider_to
from cluster.config import http_config_from
from cluster.messages.sockets import ToClient
from scheduler.arrays import int32
from scheduler.errors import ConfigError
from scheduler.request import Ended, Finish, Request, Started
from tests.cluster.api.rig import ApiRig
from tests.cluster.frontend.fake_engine import tokens

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"


def three_tokens(request: Request) -> list[ToClient]:
    """After 0.02 s in the queue, and a prompt computed in two parts."""
    started = Started(
        handle=request.handle,
        num_cached_tokens=1,
        queue_s=0.02,
        prefill_s=0.05,
        chunk_tokens=int32([2, 1]),
        chunk_s=np.asarray([0.03, 0.02], dtype=np.float32),
    )
    ended = Ended(handle=request.handle, num_preemptions=2)
    return [
        tokens(request.handle, [300], started=(started,)),
        tokens(request.handle, [301]),
        tokens(request.handle, [302], Finish.LENGTH, ended=(ended,)),
    ]


class Traced:
    """An API server whose spans are kept here."""

    def __init__(self, rig: ApiRig) -> None:
        self.rig = rig
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        tracer = CallTracer(provider, model=lambda: "tiny")
        rig.api.observers.append(tracer.observe)

    def call(
        self, path: str = "/v1/completions", headers: dict[str, str] | None = None, **body: object
    ) -> None:
        body = {"prompt": [5, 6, 7, 8], "max_tokens": 3, **body}
        self.rig.http.post(path, json=body, headers=headers or {})

    def spans(self, name: str) -> list[ReadableSpan]:
        return [s for s in self.exporter.get_finished_spans() if s.name == name]

    def span(self, name: str) -> ReadableSpan:
        (span,) = self.spans(name)
        return span


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    with ApiRig(tmp_path_factory.mktemp("traced"), script=three_tokens) as rig:
        yield Traced(rig)


@pytest.fixture
def traced(server: Traced) -> Traced:
    server.exporter.clear()
    return server


def attributes(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


def length_s(span: ReadableSpan) -> float:
    assert span.end_time is not None
    assert span.start_time is not None
    return (span.end_time - span.start_time) / 1e9


def parent_of(span: ReadableSpan) -> int:
    assert span.parent is not None
    return span.parent.span_id


def test_a_call_has_a_span_with_its_output_queue_prefill_chunks_and_decode(traced: Traced) -> None:
    traced.call()
    call, output = traced.span("POST /v1/completions"), traced.span("generate tiny")

    assert attributes(call)["http.response.status_code"] == 200
    assert attributes(call)["http.route"] == "/v1/completions"
    said = attributes(output)
    assert said["gen_ai.usage.input_tokens"] == 4
    assert said["gen_ai.usage.output_tokens"] == 3
    assert said["gen_ai.response.finish_reasons"] == ("length",)
    assert (said["stoker.cached_tokens"], said["stoker.preemptions"]) == (1, 2)
    assert parent_of(output) == call.context.span_id
    for name in ("queue", "prefill", "decode"):
        assert parent_of(traced.span(name)) == output.context.span_id
    for chunk in traced.spans("prefill chunk"):
        assert parent_of(chunk) == traced.span("prefill").context.span_id


def test_the_parts_of_an_output_take_as_long_as_the_engine_said(traced: Traced) -> None:
    traced.call()

    assert length_s(traced.span("queue")) == pytest.approx(0.02, abs=1e-4)
    assert length_s(traced.span("prefill")) == pytest.approx(0.05, abs=1e-4)
    chunks = traced.spans("prefill chunk")
    assert [length_s(chunk) for chunk in chunks] == pytest.approx([0.03, 0.02], abs=1e-4)
    assert [attributes(chunk)["stoker.tokens"] for chunk in chunks] == [2, 1]
    assert attributes(traced.span("decode"))["stoker.tokens"] == 2
    assert traced.span("prefill").start_time == traced.span("queue").end_time


def test_a_traceparent_makes_the_call_part_of_the_callers_trace(traced: Traced) -> None:
    traced.call(headers={"traceparent": TRACEPARENT})
    call = traced.span("POST /v1/completions")

    assert f"{call.context.trace_id:032x}" == TRACE_ID
    assert f"{parent_of(call):016x}" == "00f067aa0ba902b7"
    assert {s.context.trace_id for s in traced.exporter.get_finished_spans()} == {
        call.context.trace_id
    }


def test_a_caller_that_does_not_sample_has_no_spans(traced: Traced) -> None:
    traced.call(headers={"traceparent": TRACEPARENT[:-1] + "0"})

    assert traced.exporter.get_finished_spans() == ()


def test_each_output_has_a_span_of_its_own(traced: Traced) -> None:
    traced.call(n=2, temperature=1.0)

    assert sorted(attributes(s)["stoker.output"] for s in traced.spans("generate tiny")) == [0, 1]  # type: ignore[type-var]


def test_a_refused_call_has_a_span_without_outputs_and_probes_have_none(traced: Traced) -> None:
    traced.call(max_tokens=-1)
    traced.rig.http.get("/health")

    (only,) = traced.exporter.get_finished_spans()
    assert attributes(only)["http.response.status_code"] == 400


class Collector:
    """Takes OTLP over HTTP."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.names: list[str] = []
        self.services: list[str] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                export = ExportTraceServiceRequest.FromString(body)
                collector.paths.append(self.path)
                for of_resource in export.resource_spans:
                    collector.services += [
                        each.value.string_value
                        for each in of_resource.resource.attributes
                        if each.key == "service.name"
                    ]
                    for scope in of_resource.scope_spans:
                        collector.names += [span.name for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def test_spans_reach_a_collector_over_http(rig: ApiRig) -> None:
    collector = Collector()
    tracer = CallTracer(provider_to(collector.url), model=lambda: "tiny")
    rig.api.observers.append(tracer.observe)
    try:
        rig.post("/v1/completions", prompt=[5, 6], max_tokens=3)
        tracer.close()
    finally:
        rig.api.observers.remove(tracer.observe)
        collector.close()

    assert set(collector.paths) == {"/v1/traces"}
    assert set(collector.services) == {"stoker"}
    assert {"POST /v1/completions", "generate tiny", "prefill", "decode"} <= set(collector.names)


def test_an_endpoint_that_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"otlp_endpoint='127\.0\.0\.1:4318'"):
        http_config_from({"otlp_endpoint": "127.0.0.1:4318"})


def test_an_endpoint_without_opentelemetry_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cluster.config._is_installed", lambda module: False)
    with pytest.raises(ConfigError, match=r"stoker\[otel\]"):
        http_config_from({"otlp_endpoint": "http://127.0.0.1:4318"})
