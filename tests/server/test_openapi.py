"""The server's description of itself: schemathesis makes requests of it, right and wrong ones; no answer is a fault.

``python -m tests.server.test_openapi`` makes 10,000.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from tests.server.serving import Script, make_service, running

NUM_CASES: Final = 10_000

Described: TypeAlias = Any
"""A schema of schemathesis, which has no types of its own."""


@pytest.fixture(scope="module")
def described() -> Iterator[Described]:
    """Run a server with short answers, and give its description of itself."""
    with running(make_service(Script(), longest=48, max_answers=8)) as url:
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")


def examine(described: Described, num_examples: int) -> int:
    """Make requests to every operation; return their number. Raises where an answer is a server's fault."""
    num_cases = 0

    def answer(case: Described) -> None:
        nonlocal num_cases
        num_cases += 1
        if isinstance(case.body, dict):
            case.body.pop("deadline_s", None)  # one that is over at once is answered 504, as it should be
        case.validate_response(case.call(timeout=120), checks=[not_a_server_error])

    for operation in described.get_all_operations():
        asking(operation.ok(), answer, num_examples)()
    return num_cases


def asking(operation: Described, answer: Callable[[Described], None], num_examples: int) -> Callable[[], None]:
    """Make a property of an operation: each of its requests is answered."""
    modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
    cases = st.one_of([operation.as_strategy(generation_mode=mode) for mode in modes])
    limits = settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        derandomize=num_examples < NUM_CASES // 100,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )

    @limits
    @given(cases)
    def is_answered(case: Described) -> None:
        answer(case)

    return is_answered


def test_no_request_is_a_fault_of_the_server(described: Described) -> None:
    assert examine(described, 15) > 100


if __name__ == "__main__":
    with running(make_service(Script(), longest=48, max_answers=8)) as url:
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        operations = sum(1 for _ in schema.get_all_operations())
        sys.stdout.write(f"{examine(schema, NUM_CASES // operations + 1):,} requests, no fault\n")
