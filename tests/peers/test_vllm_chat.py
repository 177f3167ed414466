"""vLLM's own tests of ``/v1/chat/completions``, through OpenAI's client, against our server."""

import json
from collections.abc import Iterator, Sequence
from typing import Final, final

import pytest

from pagedkv.engine.sampling import Place
from tests.peers.borrowed_server_tests import RemoteServer, borrowed, cases_of, leave_out, served, without_server
from tests.server.serving import Script, make_service, tokens_of

THEIRS: Final = borrowed("entrypoints/openai/chat_completion/test_chat.py")
SAMPLES: Final = borrowed("entrypoints/conftest.py")

LORA: Final = "adapters (LoRA) are vLLM's extension: this server has one model, and answers 404"
PROMPT_LOGPROBS: Final = "prompt_logprobs is vLLM's extension, as is its null in each answer"
USAGE_IN_EACH_CHUNK: Final = (
    "continuous_usage_stats is vLLM's extension; the parts of the test before it are in tests/server"
)
NO_SERVER: Final = "tests a class of vLLM, and asks no server"

LEFT_OUT: Final = {
    "test_no_logprobs_chat[zephyr-lora]": LORA,
    "test_zero_logprobs_chat[zephyr-lora]": LORA,
    "test_some_logprobs_chat[zephyr-lora]": LORA,
    "test_too_many_chat_logprobs[zephyr-lora]": LORA,
    "test_single_chat_session[zephyr-lora]": LORA,
    "test_chat_streaming[zephyr-lora]": LORA,
    "test_chat_completion_stream_options[zephyr-lora]": LORA,
    "test_prompt_logprobs_chat": PROMPT_LOGPROBS,
    "test_more_than_one_prompt_logprobs_chat": PROMPT_LOGPROBS,
    "test_chat_completion_stream_options[HuggingFaceH4/zephyr-7b-beta]": USAGE_IN_EACH_CHUNK,
    "test_single_chat_session[HuggingFaceH4/zephyr-7b-beta]": "expects 37 prompt tokens, by the tokenizer of zephyr-7b",
    "test_custom_role": "roles of one's own are vLLM's extension: OpenAI refuses them, and so does this server",
    "test_long_seed": "looks for a word of pydantic in the sentence; the seed is refused with 400 here, too",
    "test_invocations": "the path /invocations is vLLM's extension, for SageMaker",
    "test_chat_completion_request_n_parameter_to_sampling_params": NO_SERVER,
    "test_chat_completion_request_n_parameter_default": NO_SERVER,
    "test_chat_completion_request_n_parameter_various_values": NO_SERVER,
    "test_chat_completion_request_n_parameter_exceeds_default_limit": NO_SERVER,
    "test_chat_completion_request_n_parameter_at_limit": NO_SERVER,
    "test_chat_completion_request_n_parameter_custom_limit": NO_SERVER,
    "test_chat_completion_request_n_parameter_massive_value": NO_SERVER,
    "test_chat_completion_request_accepts_model_specific_reasoning_effort": NO_SERVER,
    "test_chat_completion_request_rejects_unknown_reasoning_effort": NO_SERVER,
    "test_null_top_logprobs_is_same_as_omitted": NO_SERVER,
}
"""Cases that fail here, or ask no server, and why."""

PROFILE: Final = {"skills": ["a", "b", "c"], "work_history": [{"company": "c", "position": "p"}]}
RESULT: Final = '{"result": 2}'
ANSWERS: Final = {
    "provide the result without any other text": "2",
    f"the format is {RESULT}": RESULT,
    'The format is "result": 2': "The result is 2.",
    "with a different name and age": json.dumps({"name": "Bo", "age": 31, **PROFILE}),
    "example JSON for an employee profile": json.dumps({"name": "Al", "age": 30, **PROFILE}),
    "what is 1+1?": "1+1 is equal to 2.",
    "Where was it played?": "In Arlington.",
}
"""What the model says, by a text of the prompt; choices and expressions are drawn from random weights."""

HELD_ANSWERS: Final = {'The format is "result": 2': RESULT}
"""What it says instead where the answer is held to a format."""

globals().update(cases_of(THEIRS))
client = THEIRS.client
sample_json_schema = SAMPLES.sample_json_schema
sample_regex = SAMPLES.sample_regex
sample_structured_outputs_choices = SAMPLES.sample_structured_outputs_choices


@final
class FormatScript(Script):
    """A script that writes other answers where a format holds them."""

    def answer_of(self, place: Place, cue: str) -> Sequence[int]:
        """Return the tokens of the answer to a cue."""
        held = HELD_ANSWERS.get(cue) if place.sequence.processors else None
        return super().answer_of(place, cue) if held is None else tokens_of(held)


@pytest.fixture(scope="module")
def server() -> Iterator[RemoteServer]:
    script = FormatScript()
    for cue, answer in ANSWERS.items():
        script.write(cue, answer)
    with served(make_service(script, longest=8192, name=THEIRS.MODEL_NAME)) as remote:
        yield remote


@pytest.fixture(autouse=True)
def left_out(request: pytest.FixtureRequest) -> None:
    leave_out(request, LEFT_OUT)


def test_what_is_left_out_is_theirs() -> None:
    assert {name for name, reason in LEFT_OUT.items() if reason is NO_SERVER} == without_server(THEIRS)
    listed = {name.partition("[")[0] for name, reason in LEFT_OUT.items() if reason is not NO_SERVER}
    assert listed <= set(cases_of(THEIRS))
