"""No field that clients know is ignored in silence: each is served, refused with a reason, or has no effect."""

import json
from dataclasses import replace
from typing import Any, Final

import httpx
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import ChatCompletionStreamOptionsParam, completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from pydantic import BaseModel
from tokenizers.processors import TemplateProcessing

from pagedkv.server import OpenAccess, ServerConfig, Service
from pagedkv.server.anthropic.bodies import CountRequest, MessagesRequest
from pagedkv.server.app import STREAMING
from pagedkv.server.fields import UNKNOWN_FIELDS, UNSERVED, WITHOUT_EFFECT, unserved
from pagedkv.server.http import ApiError
from pagedkv.server.openai.completions import tokenize
from pagedkv.server.openai.embeddings import EmbeddingsRequest
from pagedkv.server.openai.requests import (
    ChatBatchRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    StreamOptions,
    TokenizeRequest,
    as_chat,
)
from pagedkv.server.openai.responses import as_chat_request
from pagedkv.server.openai.text_completions import prompts_of
from tests.server.conftest import Running
from tests.server.serving import TOKENIZER, byte_tokenizer, tokens_of

CLIENTS: Final[dict[type[BaseModel], type]] = {
    ChatRequest: chat_create_params.CompletionCreateParamsBase,
    CompletionRequest: completion_create_params.CompletionCreateParamsBase,
    EmbeddingsRequest: embedding_create_params.EmbeddingCreateParams,
    ResponsesRequest: response_create_params.ResponseCreateParamsBase,
    MessagesRequest: message_create_params.MessageCreateParamsBase,
    CountRequest: message_count_tokens_params.MessageCountTokensParams,
}
"""The parameters of the clients that are installed."""

VLLM: Final[dict[type[BaseModel], str]] = {
    ChatRequest: (
        "messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n "
        "presence_penalty response_format seed stop stream stream_options temperature top_p tools tool_choice "
        "reasoning_effort thinking_token_budget include_reasoning parallel_tool_calls user use_beam_search top_k "
        "min_p repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output ignore_eos "
        "min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side "
        "prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo add_generation_prompt "
        "continue_final_message add_special_tokens documents chat_template chat_template_kwargs media_io_kwargs "
        "mm_processor_kwargs structured_outputs priority request_id session_id return_tokens_as_token_ids "
        "return_token_ids return_weight_versions routed_experts_prompt_start return_token_offsets "
        "return_prompt_text mm_payload return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params "
        "vllm_xargs repetition_detection stream_interval"
    ),
    ChatBatchRequest: (
        "messages model frequency_penalty logit_bias logprobs top_logprobs logprob_token_ids max_tokens "
        "max_completion_tokens n presence_penalty response_format seed stop temperature top_p user tool_choice "
        "include_reasoning best_of use_beam_search top_k min_p repetition_penalty watermarking length_penalty "
        "early_stopping structured_outputs request_id add_generation_prompt continue_final_message chat_template "
        "chat_template_kwargs media_io_kwargs mm_processor_kwargs priority cache_salt include_stop_str_in_output "
        "guided_decoding_backend echo return_tokens_as_token_ids return_token_ids"
    ),
    CompletionRequest: (
        "model prompt echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream "
        "stream_options suffix temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking "
        "length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens "
        "spaces_between_special_tokens truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs "
        "logprob_token_ids bad_words prompt_embeds add_special_tokens response_format structured_outputs priority "
        "request_id session_id return_tokens_as_token_ids return_token_ids return_weight_versions "
        "routed_experts_prompt_start return_token_offsets mm_payload return_mm_kwargs cache_salt "
        "kv_transfer_params ec_transfer_params vllm_xargs repetition_detection thinking_token_budget "
        "stream_interval"
    ),
    ResponsesRequest: (
        "background include input instructions max_output_tokens max_tool_calls metadata model logit_bias "
        "parallel_tool_calls previous_response_id prompt reasoning include_reasoning service_tier store stream "
        "temperature text tool_choice tools top_logprobs top_p top_k min_p truncation user skip_special_tokens "
        "spaces_between_special_tokens include_stop_str_in_output presence_penalty frequency_penalty "
        "prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier watermarking request_id "
        "session_id media_io_kwargs mm_processor_kwargs priority mm_payload return_mm_kwargs cache_salt "
        "enable_response_messages previous_input_messages structured_outputs repetition_penalty seed stop "
        "stop_token_ids ignore_eos vllm_xargs kv_transfer_params ec_transfer_params chat_template_kwargs"
    ),
    MessagesRequest: (
        "model messages max_tokens metadata output_config thinking stop_sequences stream system temperature "
        "tool_choice tools top_k top_p mm_payload return_mm_kwargs cache_salt watermarking kv_transfer_params "
        "ec_transfer_params vllm_xargs chat_template_kwargs"
    ),
    CountRequest: "model messages output_config system thinking tool_choice tools chat_template_kwargs",
    TokenizeRequest: (
        "add_generation_prompt add_special_tokens chat_template chat_template_kwargs continue_final_message "
        "media_io_kwargs messages mm_processor_kwargs model prompt return_token_strs tools"
    ),
    DetokenizeRequest: "model tokens",
    EmbeddingsRequest: (
        "model user truncate_prompt_tokens padding truncation_side request_id priority mm_processor_kwargs cache_salt "
        "input add_special_tokens encoding_format dimensions use_activation embed_dtype endianness messages"
    ),
}
"""The fields of vLLM 0.33.0's requests: vllm/entrypoints/{openai/*,serve/tokenize,anthropic}/protocol.py."""

OLDER: Final = "guided_json guided_regex guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern"
"""Fields of earlier versions of vLLM, which clients still send."""


@pytest.mark.parametrize("body", VLLM)
def test_each_field_is_served_or_listed(body: type[BaseModel]) -> None:
    known = {*VLLM[body].split(), *OLDER.split()}
    if body in CLIENTS:
        known |= set(CLIENTS[body].__annotations__)
    listed = {*body.model_fields, *UNSERVED, *WITHOUT_EFFECT}
    assert known - listed == set()


def test_each_option_of_a_stream_is_served_or_listed() -> None:
    known = {"include_usage", "continuous_usage_stats", *ChatCompletionStreamOptionsParam.__annotations__}
    assert known - {*StreamOptions.model_fields, *WITHOUT_EFFECT} == set()


def test_a_field_stands_in_one_list() -> None:
    assert set(UNSERVED) & set(WITHOUT_EFFECT) == set()


CHAT: Final = {"model": "small", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
TEXT: Final = {"model": "small", "prompt": "x", "max_tokens": 1}
BODIES: Final[dict[str, tuple[type[BaseModel], dict[str, Any]]]] = {
    "/v1/chat/completions": (ChatRequest, CHAT),
    "/v1/chat/completions/batch": (ChatBatchRequest, {**CHAT, "messages": [CHAT["messages"]]}),
    "/v1/completions": (CompletionRequest, TEXT),
    "/v1/responses": (ResponsesRequest, {"model": "small", "input": "x", "max_output_tokens": 1}),
    "/v1/messages": (MessagesRequest, CHAT),
    "/v1/messages/count_tokens": (CountRequest, {"model": "small", "messages": CHAT["messages"]}),
    "/tokenize": (TokenizeRequest, {"model": "small", "prompt": "x"}),
    "/detokenize": (DetokenizeRequest, {"model": "small", "tokens": [1]}),
}


@pytest.mark.parametrize("path", BODIES)
def test_what_is_not_served_is_refused_with_the_reason_and_harmless_values_are_taken(
    server: Running, path: str
) -> None:
    body, wish = BODIES[path]
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for name in sorted(set(UNSERVED) - set(body.model_fields)):
            refused = client.post(path, json={**wish, name: "something"})
            assert refused.status_code == 400, name
            assert refused.json()["error"]["message"] == f"{name} is not served: {UNSERVED[name].reason}"
        harmless = {name: (*each.harmless, None)[0] for name, each in UNSERVED.items() if name not in body.model_fields}
        plain = client.post(path, json={**wish, **harmless})
        assert (plain.status_code, UNKNOWN_FIELDS in plain.headers) == (200, False)


@pytest.mark.parametrize("path", BODIES)
def test_fields_that_nobody_knows_are_told_in_a_header(
    server: Running, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"a_field_of_{path.replace('/', '_')}"
    wish = {**BODIES[path][1], name: 1, "user": "x", "\n": 2}
    for _ in range(2):
        answer = httpx.post(f"{server.url}{path}", json=wish, timeout=60)
        assert (answer.status_code, answer.headers[UNKNOWN_FIELDS]) == (200, f"{name}, ?")
    assert len([record for record in caplog.records if name in record.getMessage()]) == 1
    streamed = {**wish, "stream": True}
    if path in STREAMING:
        assert httpx.post(f"{server.url}{path}", json=streamed, timeout=60).headers[UNKNOWN_FIELDS] == f"{name}, ?"


def test_a_strict_server_refuses_them_and_names_what_may_be_meant(server: Running) -> None:
    strict = replace(server.service.config, strict_fields=True)
    service = Service(server.service.engine, strict, OpenAccess(), tokenizer=TOKENIZER)
    service.note_unknown_fields(ChatRequest.read(json.dumps({**CHAT, "user": "x"}).encode()))
    with pytest.raises(ApiError, match=r"there is no field max_token: did you mean max_tokens\?"):
        service.note_unknown_fields(ChatRequest.read(json.dumps({**CHAT, "max_token": 1}).encode()))
    with pytest.raises(ApiError, match=r"there is no field qqqq$"):
        service.note_unknown_fields(ChatRequest.read(json.dumps({**CHAT, "qqqq": 1}).encode()))


def test_whole_answers_have_the_fields_of_vllm_in_any_case(server: Running) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        chat = client.post("/v1/chat/completions", json=CHAT).json()
        text = client.post("/v1/completions", json=TEXT).json()
    told = {"prompt_token_ids": None, "prompt_logprobs": None}
    assert told.items() <= chat.items()
    assert told.items() <= text["choices"][0].items()
    for choice in (chat["choices"][0], text["choices"][0]):
        assert {"token_ids": None, "stop_reason": None}.items() <= choice.items()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_ended_an_answer_is_told(server: Running, path: str) -> None:
    cue, t = "what ends", tokens_of("t")[0]
    server.script.write(cue, "one two three")
    asked = {"prompt": cue} if path == "/v1/completions" else {"messages": [{"role": "user", "content": cue}]}
    wish = {"model": "small", "max_tokens": 40, "temperature": 0, **asked}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for more, reason in (({}, None), ({"stop": ["two"]}, "two"), ({"stop_token_ids": [t]}, t)):
            assert client.post(path, json={**wish, **more}).json()["choices"][0]["stop_reason"] == reason
            lines = client.post(path, json={**wish, **more, "stream": True}).text.split("data: ")[1:-1]
            chunks = [json.loads(line)["choices"][0] for line in lines]
            assert chunks[-1]["finish_reason"] == "stop"
            assert chunks[-1].get("stop_reason") == reason


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_answers_have_allowed_tokens_and_no_bad_words(server: Running, path: str) -> None:
    asked = {"prompt": "any"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "any"}]}
    wish = {"model": "small", "max_tokens": 30, "ignore_eos": True, "return_token_ids": True, "seed": 0, **asked}
    with httpx.Client(base_url=server.url, timeout=60) as client:

        def tokens(**more: object) -> list[int]:
            found: list[int] = client.post(path, json={**wish, **more}).json()["choices"][0]["token_ids"]
            return found

        a, b, c = tokens_of("ABC", ends=False)
        assert set(tokens(allowed_token_ids=[a, b, c])) == {a, b, c}
        assert set(tokens(allowed_token_ids=[a, b, c], bad_words=["B"])) == {a, c}
        assert "AB" in str(TOKENIZER.decode(tokens(allowed_token_ids=[a, b])))
        assert "AB" not in str(TOKENIZER.decode(tokens(allowed_token_ids=[a, b], bad_words=["AB"])))
        beyond = client.post(path, json={**wish, "allowed_token_ids": [10**6]})
        assert (beyond.status_code, beyond.json()["error"]["param"]) == (400, "allowed_token_ids")


def test_log_probabilities_of_named_tokens_are_told(server: Running) -> None:
    cue = "whose probabilities"
    server.script.write(cue, "B")
    wish = {"model": "small", "max_tokens": 1, "temperature": 0, "return_tokens_as_token_ids": True}
    ids = tokens_of("BFG", ends=False)
    named = {"logprob_token_ids": [ids[1], ids[0], ids[2]]}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        all_of = client.post("/v1/completions", json={**wish, "prompt": cue, "logprobs": 20, "top_k": 1}).json()
        chat = {**wish, **named, "messages": [{"role": "user", "content": cue}], "logprobs": True}
        position = client.post("/v1/chat/completions", json=chat).json()["choices"][0]["logprobs"]["content"][0]
        assert [each["token"] for each in position["top_logprobs"]] == [f"token_id:{token}" for token in ids]
        assert position["logprob"] == position["top_logprobs"][0]["logprob"]
        text = client.post("/v1/completions", json={**wish, **named, "prompt": cue, "logprobs": 0}).json()
        told = text["choices"][0]["logprobs"]["top_logprobs"][0]
        assert list(told) == [f"token_id:{token}" for token in ids]
        known = all_of["choices"][0]["logprobs"]["top_logprobs"][0]
        assert all(value == pytest.approx(known[token], abs=1e-4) for token, value in told.items() if token in known)
        refused = client.post("/v1/chat/completions", json={**chat, "logprobs": False})
        assert (refused.status_code, "logprob_token_ids need logprobs" in refused.text) == (400, True)


def test_thoughts_are_left_out_as_asked_and_counted(server: Running) -> None:
    cue = "think of it"
    server.script.write(cue, "<think>well</think>It is.")
    wish = {"model": "small", "max_tokens": 60, "messages": [{"role": "user", "content": cue}]}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for shown in (True, False):
            asked = {**wish, "include_reasoning": shown}
            answer = client.post("/v1/chat/completions", json=asked).json()
            message = answer["choices"][0]["message"]
            assert (message["content"], message.get("reasoning")) == ("It is.", "well" if shown else None)
            assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
            streamed = client.post(
                "/v1/chat/completions", json={**asked, "stream": True, "stream_options": {"include_usage": True}}
            )
            chunks = [json.loads(line) for line in streamed.text.split("data: ")[1:-1]]
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
            assert "".join(delta.get("content", "") for delta in deltas) == "It is."
            assert "".join(delta.get("reasoning", "") for delta in deltas) == ("well" if shown else "")
            assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}


def test_a_chat_echoes_the_message_that_it_continues(server: Running) -> None:
    said = [{"role": "user", "content": "go on here"}, {"role": "assistant", "content": "It is"}]
    server.script.write("go on here", " so.")
    wish = {"model": "small", "max_tokens": 20, "messages": said, "continue_final_message": True, "echo": True}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        answer = client.post("/v1/chat/completions", json=wish).json()
        assert answer["choices"][0]["message"]["content"] == "It is so."
        lines = client.post("/v1/chat/completions", json={**wish, "stream": True}).text.split("data: ")[1:-1]
        deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
        assert "".join(delta.get("content", "") for delta in deltas) == "It is so."
        asked = client.post(
            "/v1/chat/completions", json={**wish, "messages": said[:1], "continue_final_message": False}
        )
        assert asked.json()["choices"][0]["message"]["content"] == " so."


def test_only_other_values_are_refused() -> None:
    assert unserved({"echo": False, "skip_special_tokens": True, "modalities": ["text"], "audio": None}) is None
    assert unserved({"user": "x", "echo": True}) == ("echo", UNSERVED["echo"].reason)
    assert unserved({"modalities": ["text", "audio"]}) is not None


@pytest.mark.parametrize(
    "held",
    [
        {"response_format": {"type": "regex", "regex": "(red|blue) lamp"}},
        {"structured_outputs": {"choice": ["red lamp", "blue lamp"]}},
    ],
)
def test_formats_hold_text_completions(server: Running, held: dict[str, Any]) -> None:
    wish = {**TEXT, "prompt": ["held", "held too"], "max_tokens": 20, "n": 2, **held}
    answer = httpx.post(f"{server.url}/v1/completions", json=wish, timeout=60).json()
    assert {each["text"] for each in answer["choices"]} <= {"red lamp", "blue lamp"}
    assert len(answer["choices"]) == 4


def test_formats_hold_responses(server: Running) -> None:
    wish = {"model": "small", "input": "held", "structured_outputs": {"choice": ["red lamp", "blue lamp"]}}
    answer = httpx.post(f"{server.url}/v1/responses", json=wish, timeout=60).json()
    assert answer["output"][0]["content"][0]["text"] in {"red lamp", "blue lamp"}


def test_responses_are_drawn_as_asked(server: Running) -> None:
    wish = {"model": "small", "input": "drawn", "max_output_tokens": 8, "logit_bias": {"65": 100}}
    answer = httpx.post(f"{server.url}/v1/responses", json=wish, timeout=60).json()
    assert answer["output"][0]["content"][0]["text"] == TOKENIZER.decode([65] * 8)


def test_the_effort_of_reasoning_is_a_variable_of_the_template() -> None:
    asked = ChatRequest.model_validate({**CHAT, "reasoning_effort": "none"})
    assert as_chat(asked).options == {"reasoning_effort": "none", "enable_thinking": False}
    response = ResponsesRequest.model_validate({"input": "x", "reasoning": {"effort": "high", "summary": "auto"}})
    options = as_chat(as_chat_request(response, [{"role": "user", "content": "x"}])).options
    assert options == {"reasoning_effort": "high", "enable_thinking": True}
    own = ChatRequest.model_validate(
        {**CHAT, "reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": 0}}
    )
    assert as_chat(own).options == {"reasoning_effort": "low", "enable_thinking": 0}


def test_text_completions_have_special_tokens_unless_told_otherwise(server: Running) -> None:
    tokenizer: Any = byte_tokenizer()
    begin = tokenizer.convert_tokens_to_ids("<|im_start|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", pair=None, special_tokens=[("<|im_start|>", begin)]
    )
    service = Service(server.service.engine, ServerConfig("small"), OpenAccess(), tokenizer=tokenizer)
    for adds, num_added in ((None, 1), (True, 1), (False, 0)):
        (prompt,) = prompts_of(service, "x", CompletionRequest(prompt="x", add_special_tokens=adds), most=1)
        assert list(prompt.token_ids).count(begin) == num_added


def test_a_conversation_has_the_special_tokens_of_its_template_alone(server: Running) -> None:
    body = TokenizeRequest.model_validate({"messages": CHAT["messages"], "add_special_tokens": True})
    caller = server.service.access.identify({})
    plain = tokenize(server.service, body.model_copy(update={"add_special_tokens": None}), caller)
    assert tokenize(server.service, body, caller) == plain  # a tokenizer that adds none
    tokenizer: Any = byte_tokenizer()
    begin = tokenizer.convert_tokens_to_ids("<|im_start|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", pair=None, special_tokens=[("<|im_start|>", begin)]
    )
    service = Service(server.service.engine, ServerConfig("small"), OpenAccess(), tokenizer=tokenizer)
    with pytest.raises(ApiError, match="the chat template writes all"):
        tokenize(service, body, caller)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_prompts_are_shortened_as_asked(server: Running, path: str) -> None:
    asked = {"prompt": list(range(65, 75))} if path == "/v1/completions" else {"messages": CHAT["messages"]}
    wish = {"model": "small", "max_tokens": 1, "return_token_ids": True, **asked}
    with httpx.Client(base_url=server.url, timeout=60) as client:

        def prompt(**more: object) -> list[int]:
            answer = client.post(path, json={**wish, **more}).json()
            found: list[int] = {**answer["choices"][0], **answer}["prompt_token_ids"]
            return found

        whole = prompt()
        assert (
            prompt(truncate_prompt_tokens=4) == prompt(truncate_prompt_tokens=4, truncation_side="left") == whole[-4:]
        )
        assert prompt(truncate_prompt_tokens=4, truncation_side="right") == whole[:4]
        assert prompt(truncate_prompt_tokens=-1) == prompt(truncate_prompt_tokens=1000) == whole
        long = {"prompt": [65] * 5000} if "prompt" in asked else {"messages": [{"role": "user", "content": "x" * 5000}]}
        assert len(prompt(**long, truncate_prompt_tokens=-1)) == server.service.longest - 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_special_tokens_and_stop_texts_are_part_of_the_text_if_asked(server: Running, path: str) -> None:
    cue = "what is special"
    server.script.write(cue, "a<|im_start|>b stop c")
    asked = {"prompt": cue} if path == "/v1/completions" else {"messages": [{"role": "user", "content": cue}]}
    with httpx.Client(base_url=server.url, timeout=60) as client:

        def text(**more: object) -> str:
            choice = client.post(path, json={"model": "small", "max_tokens": 40, **asked, **more}).json()["choices"][0]
            return str(choice["text"] if path == "/v1/completions" else choice["message"]["content"])

        if path == "/v1/completions":  # a parser of thoughts and calls reads special tokens in any case
            assert text() == text(skip_special_tokens=True) == "ab stop c"
        assert text(skip_special_tokens=False) == "a<|im_start|>b stop c"
        assert text(stop=["stop", "op c"]).endswith("b ")
        assert text(stop=["stop", "op c"], include_stop_str_in_output=True).endswith("b stop")


def test_a_continued_message_may_say_that_nothing_is_opened(server: Running) -> None:
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It is"}]
    wish = {"model": "small", "messages": said, "continue_final_message": True}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for added in ({}, {"add_generation_prompt": False}):
            tokens = client.post("/tokenize", json={**wish, **added}).json()["tokens"]
            assert str(TOKENIZER.decode(tokens)).endswith("It is")
            assert client.post("/v1/chat/completions", json={**wish, **added, "max_tokens": 1}).status_code == 200
        assert client.post("/tokenize", json={**wish, "add_generation_prompt": True}).status_code == 400
