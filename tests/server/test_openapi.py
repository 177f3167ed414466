"""The server's description of itself: schemathesis makes requests of it, right and wrong ones.

No answer is a fault, and each has a status, headers and a body that the description has for it.

``python -m tests.server.test_openapi`` makes 10,000.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.server.serving import Script, make_service, running

NUM_CASES: Final = 10_000
MOST_WITHOUT_BODY: Final = 20
"""Requests to a path that takes no body."""
MOST_AT_ONCE: Final = 200
"""Requests to a path in one round."""

Described: TypeAlias = Any
"""A schema of schemathesis, which has no types of its own."""


@pytest.fixture(scope="module")
def described() -> Iterator[Described]:
    """Run a server with short answers, and give its description of itself."""
    with running(make_service(Script(), longest=48, max_answers=8)) as url:
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")


CHECKS: Final = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


def examine(described: Described, num_cases: int, *, is_random: bool) -> Counter[str]:
    """Make requests, most of them to paths that take a body, in rounds; return the number by operation.

    Args:
        described: the server; num_cases: requests at least.
        is_random: whether each run makes others.

    Raises where an answer is a server's fault, or not what the description says.
    """
    seen: Counter[str] = Counter()

    def answer(case: Described) -> None:
        seen[case.operation.label] += 1
        if isinstance(case.body, dict):
            case.body.pop("deadline_s", None)  # one that is over at once is answered 504, as it should be
        response = case.call(timeout=120)
        case.validate_response(response, checks=CHECKS)
        if response.headers.get("content-type", [""])[0].startswith("text/event-stream"):
            require_events(response.text)

    operations = [operation.ok() for operation in described.get_all_operations()]
    posts = [operation for operation in operations if operation.method == "post"]
    num_without_body = min(MOST_WITHOUT_BODY, -(-num_cases // len(operations)))
    for operation in operations:
        if operation.method != "post":
            asking(operation, answer, num_without_body, is_random=is_random)()
    while seen.total() < num_cases:
        num_each = min(MOST_AT_ONCE, -(-(num_cases - seen.total()) // len(posts)))
        for operation in posts:
            asking(operation, answer, num_each, is_random=is_random)()
    return seen


def require_events(text: str) -> None:
    """Check that a stream has events alone, whose data is JSON, and an end."""
    events = [event for event in text.split("\n\n") if event]
    data = [line.removeprefix("data: ") for event in events for line in event.split("\n") if line.startswith("data: ")]
    assert len(data) == len(events)
    if data[-1] == "[DONE]":
        data.pop()
    assert all(isinstance(json.loads(each), dict) for each in data)


def asking(
    operation: Described, answer: Callable[[Described], None], num_examples: int, *, is_random: bool
) -> Callable[[], None]:
    """Make a property of an operation: each of its requests is answered."""
    modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
    cases = st.one_of([operation.as_strategy(generation_mode=mode) for mode in modes])
    limits = settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        derandomize=not is_random,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )

    @limits
    @given(cases)
    def is_answered(case: Described) -> None:
        answer(case)

    return is_answered


def test_no_request_is_a_fault_of_the_server(described: Described) -> None:
    assert examine(described, 70, is_random=False).total() >= 70


def test_an_answer_that_is_not_as_described_would_be_noticed(described: Described) -> None:
    """A negative control: a field of another type."""
    described.raw_schema["components"]["schemas"]["Version"]["properties"]["version"] = {"type": "integer"}
    changed: Described = schemathesis.openapi.from_dict(described.raw_schema)
    changed.config.update(base_url=described.get_base_url())
    (operation,) = [each.ok() for each in changed.get_all_operations() if each.ok().path == "/version"]
    with pytest.raises(schemathesis.errors.FailureGroup):
        operation.Case().call_and_validate(checks=CHECKS)


if __name__ == "__main__":
    with running(make_service(Script(), longest=48, max_answers=8)) as url:
        seen = examine(schemathesis.openapi.from_url(f"{url}/openapi.json"), NUM_CASES, is_random=True)
    for name, number in sorted(seen.items()):
        sys.stdout.write(f"{number:6,} {name}\n")
    sys.stdout.write(f"{seen.total():6,} requests, no fault, and each answer as it is described\n")
