"""What the server says of itself holds: schemathesis makes requests of it, right ones and wrong ones, and no answer is a fault.

``python -m tests.server.test_openapi`` makes 10,000.
"""

import sys
from collections.abc import Iterator
from typing import Any, Final

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error

from tests.server.serving import Script, make_service, running

NUM_CASES: Final = 10_000


@pytest.fixture(scope="module")
def described() -> Iterator[Any]:
    """Run a server with short answers, and give its description of itself."""
    with running(make_service(Script(), longest=48, max_answers=8)) as url:
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")


def examine(described: Any, num_examples: int) -> int:  # noqa: ANN401 - schemathesis' schema
    """Make requests to every operation; return their number. Raises where an answer is a server's fault."""
    num_cases = 0
    for each in described.get_all_operations():
        operation = each.ok()

        @settings(
            max_examples=num_examples,
            deadline=None,
            database=None,
            derandomize=num_examples < 100,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @schemathesis_given(operation)
        def answered(case: Any) -> None:  # noqa: ANN401 - schemathesis' case
            nonlocal num_cases
            num_cases += 1
            response = case.call(timeout=120)
            case.validate_response(response, checks=[not_a_server_error])

        answered()
    return num_cases


def schemathesis_given(operation: Any) -> Any:  # noqa: ANN401 - a decorator of hypothesis
    """Draw requests of an operation: by its schema, and against it."""
    from hypothesis import given
    from hypothesis import strategies as st
    from schemathesis import GenerationMode

    return given(
        st.one_of(operation.as_strategy(generation_mode=mode) for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE))
    )


def test_no_request_is_a_fault_of_the_server(described: Any) -> None:  # noqa: ANN401 - schemathesis' schema
    assert examine(described, 15) > 100


if __name__ == "__main__":
    with running(make_service(Script(), longest=48, max_answers=8)) as url:
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        operations = sum(1 for _ in schema.get_all_operations())
        sys.stdout.write(f"{examine(schema, NUM_CASES // operations + 1):,} requests, no fault\n")
