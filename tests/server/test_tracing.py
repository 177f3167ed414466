"""Spans of OpenTelemetry: one a request, with the conventions' names, the client's parent, and no texts."""

from collections.abc import Iterator
from typing import Final

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from pagedkv.server import create_app
from tests.server.conftest import Running
from tests.server.serving import Script, make_service, running

TRACE_ID: Final = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID: Final = "b7ad6b7169203331"
PARENT: Final = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
PROMPT: Final = "a prompt that no span may have"


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    """Keep spans in memory."""
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def served(exporter: InMemorySpanExporter) -> Iterator[Running]:
    """Run a server that is traced."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    script = Script()
    script.write(PROMPT, "an answer of its own")
    service = make_service(script)
    with running(service, create_app(service, tracer_provider=provider)) as url:
        yield Running(url, service, script)


def ask(served: Running, exporter: InMemorySpanExporter, **more: object) -> tuple[httpx.Response, ReadableSpan]:
    """Ask, and return the answer with its one span."""
    exporter.clear()
    body = {"model": "small", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 40, **more}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, headers=PARENT, timeout=60)
    (span,) = exporter.get_finished_spans()
    return answer, span


def test_a_request_has_one_span_below_its_client_s(served: Running, exporter: InMemorySpanExporter) -> None:
    answer, span = ask(served, exporter, n=2, temperature=0)
    told = answer.json()
    assert span.name == "chat small"
    assert span.kind is SpanKind.SERVER
    assert span.context is not None
    assert span.parent is not None
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert f"{span.parent.span_id:016x}" == PARENT_ID
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.start_time < span.end_time
    attributes = dict(span.attributes or {})
    assert attributes.pop("gen_ai.response.time_to_first_chunk") > 0  # type: ignore[operator]
    usage = told["usage"]
    details = usage["prompt_tokens_details"]
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "pagedkv",
        "gen_ai.request.model": "small",
        "gen_ai.response.model": "small",
        "gen_ai.response.id": told["id"],
        "gen_ai.request.max_tokens": 40,
        "gen_ai.request.temperature": 0,
        "gen_ai.request.top_p": 1,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.finish_reasons": ("stop", "stop"),
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": details["cached_tokens"],
        "gen_ai.usage.cache_creation.input_tokens": details["cache_write_tokens"],
        "http.route": "/v1/chat/completions",
    }


def test_no_text_is_in_a_span(served: Running, exporter: InMemorySpanExporter) -> None:
    _, span = ask(served, exporter, stop=["of its"])
    for text in (PROMPT, "an answer", "of its"):
        assert text not in span.to_json()


def test_a_request_that_fails_has_its_status(served: Running, exporter: InMemorySpanExporter) -> None:
    answer, span = ask(served, exporter, deadline_s=1e-6)
    assert answer.status_code == 504
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "504"
