"""Tracing: an OpenTelemetry span for each request, named by the semantic conventions for generative AI.

A span is made when its request has ended, with the times of its begin and end, since all of its numbers are known then.
Its parent is the span in the client's ``traceparent`` header. No attribute has the text of a prompt, an answer or a
stop, or a key. The conventions (https://opentelemetry.io/docs/specs/semconv/gen-ai/) are in development, and their
names may change.
"""

from typing import TYPE_CHECKING, Final, TypeAlias, final

from pagedkv.contract.extras import needing

with needing("otel", "tracing"):
    from opentelemetry.trace import SpanKind, Status, StatusCode, TracerProvider
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from pagedkv.server.service import Served, Service

Value: TypeAlias = str | int | float | tuple[str, ...]

NS: Final = 10**9
PROVIDER: Final = "pagedkv"
TEXT_PATH: Final = "/v1/completions"


@final
class Tracing:
    """Makes spans.

    Args:
        service: the service, which calls :meth:`served`.
        provider: receives the spans.
    """

    def __init__(self, service: "Service", provider: TracerProvider) -> None:
        self._service = service
        self._tracer = provider.get_tracer("pagedkv.server")
        self._propagator = TraceContextTextMapPropagator()

    def served(self, served: "Served") -> None:
        """Make the span of a request that has ended."""
        model = served.request.adapter or self._service.config.model_name
        operation = "text_completion" if served.request.endpoint == TEXT_PATH else "chat"
        begun_ns = int(served.arrived_s * NS)
        span = self._tracer.start_span(
            f"{operation} {model}",
            context=self._propagator.extract(dict(served.request.caller.trace)),
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": PROVIDER,
                "gen_ai.request.model": model,
                "gen_ai.response.model": model,
                "gen_ai.response.id": served.request.request_id,
                "http.route": served.request.endpoint,
                **_request_attributes(served),
                **self._answer_attributes(served),
            },
            start_time=begun_ns,
        )
        if served.problem is not None:
            span.set_attribute("error.type", str(served.problem.status))
            span.set_status(Status(StatusCode.ERROR))
        elif served.has_left:
            span.set_attribute("error.type", "client_disconnected")
        span.end(begun_ns + int(served.total_s * NS))

    def _answer_attributes(self, served: "Served") -> dict[str, Value]:
        if not served.outputs:
            return {}
        usage = self._service.usage(served.outputs)
        completions = [each for output in served.outputs for each in output.completions]
        attributes: dict[str, Value] = {
            "gen_ai.usage.input_tokens": usage.num_prompt,
            "gen_ai.usage.output_tokens": usage.num_generated,
            "gen_ai.usage.cache_read.input_tokens": usage.num_read,
            "gen_ai.usage.cache_creation.input_tokens": usage.num_written,
            "gen_ai.response.finish_reasons": tuple(each.finish_reason or "aborted" for each in completions),
        }
        first = [output.first_token_seconds for output in served.outputs if output.first_token_seconds is not None]
        if first:
            attributes["gen_ai.response.time_to_first_chunk"] = min(first)
        return attributes


def _request_attributes(served: "Served") -> dict[str, Value]:
    params = served.request.params
    attributes: dict[str, Value] = {
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
    }
    if params.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = params.max_tokens
    if params.seed is not None:
        attributes["gen_ai.request.seed"] = params.seed
    if params.n > 1:
        attributes["gen_ai.request.choice.count"] = params.n
    return attributes
