"""vLLM's own tests of ``/v1/messages``, through Anthropic's client, against our server."""

import json
from collections.abc import Iterator
from typing import Final

import pytest

from tests.peers.borrowed_server_tests import RemoteServer, borrowed, cases_of, leave_out, served, without_server
from tests.server.serving import Script, call_text, make_service

THEIRS: Final = borrowed("entrypoints/anthropic/test_messages.py")

LEFT_OUT: Final = {
    "test_anthropic_streaming_cache_usage": "vLLM calls all that a prompt writes created; in Anthropic's "
    "reference, and here, a prompt without breakpoints creates nothing, and what it writes is plain input",
}
"""Cases that fail here, and why."""

ANSWERS: Final = {
    "how are you!": "Fine, thanks.",
    "weather like in New York": call_text("get_current_weather", {"location": "New York"}),
    "Extract the key information": json.dumps(
        {"name": "John Smith", "email": "john@example.com", "plan_interest": "Enterprise", "demo_requested": True}
    ),
    "Cache coverage sentinel": "ok",
}
"""What the model says, by a text of the prompt."""

globals().update(cases_of(THEIRS))
client = THEIRS.client


@pytest.fixture(scope="module")
def server() -> Iterator[RemoteServer]:
    script = Script()
    for cue, answer in ANSWERS.items():
        script.write(cue, answer)
    with served(make_service(script, longest=8192, name="claude-3-7-sonnet-latest")) as remote:
        yield remote


@pytest.fixture(autouse=True)
def left_out(request: pytest.FixtureRequest) -> None:
    leave_out(request, LEFT_OUT)


def test_what_is_left_out_is_theirs() -> None:
    assert set(LEFT_OUT) <= set(cases_of(THEIRS))
    assert without_server(THEIRS) == set()
