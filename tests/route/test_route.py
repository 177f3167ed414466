"""A router before servers: what passes, where it goes, and what happens when an engine or a client ends."""

import gzip
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from pagedkv.api_keys import KeyOwner, entry_of, new_key, parse_key_file
from pagedkv.errors import ConfigurationError, NoEngineError
from pagedkv.probe.compat import load_tokenizer
from pagedkv.route import Engine, EngineRouter, RouteConfig, read_engines
from pagedkv.route.prompts import as_question
from tests.route.engines import FakeEngine, Publisher, closing, routed, served

TEXT = "".join(f"word {number} of a prompt. " for number in range(40))


@pytest.fixture
def two() -> Iterator[tuple[FakeEngine, FakeEngine, Engine, Engine]]:
    """Two engines that publish nothing."""
    first, second = FakeEngine(), FakeEngine()
    with served(first) as one, served(second) as other:
        yield first, second, Engine(one), Engine(other)


def until(is_so: Callable[[], bool]) -> None:
    """Wait until something is so; the test's own bound is 30 seconds."""
    ends_s = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < ends_s


def complete(client: httpx.Client, prompt: str, **more: object) -> httpx.Response:
    return client.post("/v1/completions", json={"model": "base", "prompt": prompt, **more})


def test_requests_and_answers_pass_byte_for_byte() -> None:
    zipped = gzip.compress(b"an answer, compressed by its engine")
    headers = [(b"content-type", b"text/x-odd"), (b"content-encoding", b"gzip"), (b"x-own", b"\xe4"), (b"x-own", b"2")]
    engine = FakeEngine(status=418, headers=headers, pieces=(zipped[:7], zipped[7:]))
    with served(engine) as url, routed(Engine(url)) as (client, _):
        body = b'{"model" :  "base", "prompt": "\xc3\xa4", "unknown": [1,2 ]}'
        sent = {"authorization": "Bearer of-the-engine", "x-odd": "1", "content-type": "application/json"}
        with client.stream("POST", "/v1/completions?a=%2F&b", content=body, headers=sent) as answer:
            raw = b"".join(answer.iter_raw())
        assert (answer.status_code, raw) == (418, zipped)
        assert [value for name, value in answer.headers.raw if name.lower() == b"x-own"] == [b"\xe4", b"2"]
        assert answer.headers["x-pagedkv-replica"] == url
        assert answer.headers["x-pagedkv-routing"] == "it is the only one"
        scope, received = engine.asked[0]
        given = dict(scope["headers"])
        assert (received, scope["query_string"]) == (body, b"a=%2F&b")
        assert (given[b"authorization"], given[b"x-odd"]) == (b"Bearer of-the-engine", b"1")
        assert b"accept-encoding" in given
        assert given[b"host"] == url.removeprefix("http://").encode()
        client.get("/v1/anything/a%2Fb")
        assert engine.asked[1][0]["raw_path"] == b"/v1/anything/a%2Fb"


def test_a_conversation_goes_where_it_was_sent_before_without_any_events(
    two: tuple[FakeEngine, FakeEngine, Engine, Engine],
) -> None:
    first, second, *engines = two
    with routed(*engines) as (client, router):
        homes = {}
        for number in range(4):
            homes[number] = complete(client, f"{number} {TEXT}").headers["x-pagedkv-replica"]
        assert len(set(homes.values())) == 2, "load decides where nothing is known"
        for number, home in homes.items():
            answer = complete(client, f"{number} {TEXT} And another turn.")
            assert answer.headers["x-pagedkv-replica"] == home
            assert int(answer.headers["x-pagedkv-cached"]) == len(f"{number} {TEXT}") // 16 * 16
            assert answer.headers["x-pagedkv-routing"] == "it has most of the prompt"
            assert "tokenise;dur=" in answer.headers["server-timing"]
        assert {status.source for status in router.statuses()} == {"sent"}
        assert {status.index for status in router.statuses()} == {"degraded"}
        page = client.get("/route/routes").json()
        assert len(page["routes"]) == 8
        assert "And another turn" not in json.dumps(page), "no prompts"
        assert "tokens cached" in page["routes"][0]["explanation"]
        assert 'pagedkv_route_requests_total{engine="' in client.get("/metrics").text
        assert "Where requests go" in client.get("/route").text
    assert len(first.asked) == len(second.asked) == 4


def test_what_an_engine_publishes_is_predicted_and_other_salts_are_not() -> None:
    engine, publisher = FakeEngine(), Publisher()
    tokens = list(TEXT.encode())[:64]
    event: dict[str, Any] = {"type": "BlockStored", "block_hashes": [5, -6], "parent_block_hash": None}
    event |= {"token_ids": tokens}
    event |= {"block_size": 32, "lora_id": None, "medium": "GPU", "extra_keys": [["salt"], None]}
    try:
        with served(engine) as url, routed(Engine(url, publisher.endpoint)) as (client, router):
            publisher.await_subscriber()
            publisher.publish(event)
            until(lambda: router.statuses()[0].num_blocks == 2)
            assert router.statuses()[0].source == "events"
            assert complete(client, TEXT, cache_salt="salt").headers["x-pagedkv-cached"] == "64"
            assert complete(client, TEXT).headers["x-pagedkv-cached"] == "0"
            publisher.number = 0  # another process
            publisher.publish({"type": "BlockSplit"})
            until(lambda: router.statuses()[0].num_restarts == 1)
            assert complete(client, TEXT, cache_salt="salt").headers["x-pagedkv-cached"] == "0"
            until(lambda: router.statuses()[0].problem is not None)
            assert "unknown kinds: BlockSplit" in str(router.statuses()[0].problem)
    finally:
        publisher.close()


def test_blocks_of_another_form_than_the_others_are_named_and_served_by_what_was_sent() -> None:
    engines = FakeEngine(), FakeEngine()
    publishers = Publisher(), Publisher()
    event = {"type": "BlockStored", "block_hashes": [5], "parent_block_hash": None, "lora_id": None, "medium": "GPU"}
    try:
        with served(engines[0]) as one, served(engines[1]) as other:
            listed = [Engine(one, publishers[0].endpoint), Engine(other, publishers[1].endpoint)]
            with routed(*listed) as (_, router):
                for publisher, size in zip(publishers, (32, 64), strict=True):
                    publisher.await_subscriber()
                    publisher.publish({**event, "block_size": size, "token_ids": list(range(size))})
                    until(lambda: any(each.num_blocks for each in router.statuses()))
                until(lambda: router.statuses()[1].problem is not None)
                assert "block_size=64" in str(router.statuses()[1].problem)
                assert [each.source for each in router.statuses()] == ["events", "sent"]
    finally:
        for publisher in publishers:
            publisher.close()


def test_a_request_moves_only_while_nothing_of_it_was_sent() -> None:
    engine = FakeEngine()
    with closing() as (closed, posts), served(engine) as url, routed(Engine(closed), Engine(url)) as (client, router):
        while not posts:
            answer = complete(client, f"{len(engine.asked)} {TEXT}")
            assert (answer.status_code, answer.headers["x-pagedkv-replica"]) == (200, url)
        assert client.get("/route/routes").json()["moved"] == len(posts)
        router.drain(closed)
        engine.ends_early = True
        num_asked = len(engine.asked)
        with pytest.raises(httpx.RemoteProtocolError):
            complete(client, TEXT)
        assert len(engine.asked) == num_asked + 1, "not asked again behind its first byte"
        router.drain(closed, is_draining=False)
        router.drain(url)
        assert complete(client, TEXT).status_code == 502


def test_an_engine_that_answers_503_has_taken_nothing(two: tuple[FakeEngine, FakeEngine, Engine, Engine]) -> None:
    first, second, *engines = two
    first.status = 503
    with routed(*engines) as (client, _):
        while not first.asked:
            assert complete(client, f"{len(second.asked)} {TEXT}").headers["x-pagedkv-replica"] == engines[1].url
        second.status = 503
        assert complete(client, TEXT).status_code == 502


def test_an_engine_that_is_gone_is_left_out_until_it_answers_again() -> None:
    stays = FakeEngine()
    with served(stays) as url:
        with served(FakeEngine()) as gone:
            pass
        with routed(Engine(gone), Engine(url)) as (client, router):
            answers = {complete(client, f"{number} {TEXT}").headers["x-pagedkv-replica"] for number in range(4)}
            assert answers == {url}
            assert [each.is_up for each in router.statuses()] == [False, True]
        with routed(Engine(gone)) as (client, _):
            assert client.get("/ready").status_code == 503
            assert client.get("/health").status_code == 200
            refused = client.post("/v1/messages", json={"messages": []})
            assert (refused.status_code, refused.json()["type"]) == (503, "error")


def test_a_client_that_leaves_ends_its_request_at_the_engine() -> None:
    engine = FakeEngine(pieces=(b"data: 1\n\n",), waits=True)
    with served(engine) as url, routed(Engine(url)) as (client, router):
        with client.stream("POST", "/v1/completions", json={"prompt": TEXT, "stream": True}) as answer:
            pieces = answer.iter_raw()  # which closes the connection when it goes
            assert next(pieces) == b"data: 1\n\n", "a stream comes piece by piece"
            assert router.statuses()[0].num_decoding == 1
        assert engine.has_left.wait(30)
        until(lambda: router.statuses()[0].num_decoding == 0)


def test_engines_join_drain_and_leave_while_requests_come(
    two: tuple[FakeEngine, FakeEngine, Engine, Engine], tmp_path: Path
) -> None:
    _, _, one, other = two
    path = tmp_path / "engines.json"
    path.write_text(json.dumps([{"url": one.url}]))
    key, digest = new_key()
    keys = parse_key_file(entry_of(KeyOwner("operations", is_admin=True), digest), "keys")
    config = RouteConfig(health_s=0.05, engines_file=path, keys=keys)
    with routed(*read_engines(path), config=config) as (client, router):
        assert complete(client, TEXT).headers["x-pagedkv-replica"] == one.url
        path.write_text("[{}]")
        path.write_text(json.dumps([{"url": one.url, "is_draining": True}, {"url": other.url}]))
        until(lambda: len(router.engines) == 2)
        assert complete(client, TEXT).headers["x-pagedkv-replica"] == other.url
        assert client.put("/route/engines", json=[{"url": one.url}]).status_code == 403
        assert client.get("/route/routes").status_code == 403
        admin = {"authorization": f"Bearer {key}"}
        assert client.put("/route/engines", json=[{"url": "ftp://a"}], headers=admin).status_code == 400
        changed = client.put("/route/engines", json=[{"url": one.url}], headers=admin)
        assert changed.json() == [{"url": one.url, "kv_events": None, "kv_events_replay": None, "is_draining": False}]
        assert complete(client, TEXT).headers["x-pagedkv-replica"] == one.url


def test_bodies_are_bounded(two: tuple[FakeEngine, FakeEngine, Engine, Engine]) -> None:
    from pagedkv.route.proxy import ProxyLimits  # noqa: PLC0415

    config = RouteConfig(ProxyLimits(max_body=100), health_s=0.05)
    with routed(two[2], config=config) as (client, _):
        assert complete(client, TEXT).status_code == 413
        assert not two[0].asked


@pytest.mark.parametrize(
    ("path", "body", "question"),
    [
        ("/v1/completions", {"prompt": [1, 2]}, [1, 2]),
        ("/v1/completions", {"prompt": [[1, 2], [3]]}, [1, 2]),
        ("/v1/completions", {"prompt": ["a", "b"], "model": "m"}, {"model": "m", "prompt": "a"}),
        (
            "/v1/chat/completions",
            {"messages": [1], "tools": [2], "stream": True, "chat_template_kwargs": {"a": 1}},
            {"messages": [1], "tools": [2], "chat_template_kwargs": {"a": 1}},
        ),
        (
            "/v1/messages",
            {
                "system": [{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}],
                "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            },
            {
                "model": None,
                "messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}],
            },
        ),
        (
            "/v1/responses",
            {"input": "hi", "instructions": "be kind"},
            {
                "model": None,
                "messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}],
            },
        ),
    ],
)
def test_prompts_become_questions(path: str, body: dict[str, object], question: object) -> None:
    assert as_question(path, body) == question


def test_a_body_that_is_no_prompt_is_passed_on_by_load(two: tuple[FakeEngine, FakeEngine, Engine, Engine]) -> None:
    first, _, engine, _ = two
    with routed(engine) as (client, _):
        for body in (b"", b"[", b"[]", b'{"prompt": 7}', b'{"prompt": [true]}', b'{"prompt": [-1]}'):
            answer = client.post("/v1/completions", content=body)
            assert answer.status_code == 200
            assert "x-pagedkv-cached" not in answer.headers
        assert [body for _, body in first.asked][1] == b"["


def test_a_tokenizer_here_spares_the_engines_and_applies_the_models_template(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[user]": 0, "a": 1, "b": 2, "?": 3}, "?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    whole = PreTrainedTokenizerFast(tokenizer_object=inner)  # type: ignore[no-untyped-call]
    whole.chat_template = "{% for m in messages %}[user] {{ m['content'] }} {% endfor %}"
    whole.save_pretrained(tmp_path)
    engine = FakeEngine()
    with served(engine) as url, routed(Engine(url), tokenizer=load_tokenizer(str(tmp_path))) as (client, _):
        first = [{"role": "user", "content": "a b " * 20}]
        for messages, cached in ((first, "0"), ([*first, {"role": "user", "content": "b"}], "32")):
            answer = client.post("/v1/chat/completions", json={"model": "base", "messages": messages})
            assert (answer.status_code, answer.headers["x-pagedkv-cached"]) == (200, cached)
        assert complete(client, "a " * 33).headers["x-pagedkv-cached"] == "0"
        assert complete(client, "a " * 33).headers["x-pagedkv-cached"] == "32"
    assert not engine.questions


def test_as_a_library_it_takes_ten_lines() -> None:
    with EngineRouter([Engine("http://a:8000"), Engine("http://b:8000/")]) as router:
        first = router.choose(list(range(100)))
        router.prefilled(first)
        router.ended(first)
        again = router.choose([*range(100), 7])
        assert (again.url, again.num_predicted) == (first.url, 96)
        router.take_back(again)
        for url in ("http://a:8000", "http://b:8000"):
            router.drain(url)
        with pytest.raises(NoEngineError, match="draining"):
            router.choose([1])


def test_wrong_engines_are_named(tmp_path: Path) -> None:
    for url in ("a:8000", "http://a/v1", "ftp://a"):
        with pytest.raises(ConfigurationError, match="not the address of a server"):
            Engine(url)
    with pytest.raises(ConfigurationError, match="named twice"):
        EngineRouter([Engine("http://a"), Engine("http://a/")])
    with pytest.raises(ConfigurationError, match="give both"):
        Engine("http://a", None, "tcp://a:1")
    path = tmp_path / "engines.json"
    for text, told in (("{", "not JSON"), ("[]", "list of engines"), ('[{"uri": 1}]', "entry 1 of .* must have a url")):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match=told):
            read_engines(path)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_engines(tmp_path / "absent")


def test_headers_without_an_end_end_their_connection(two: tuple[FakeEngine, FakeEngine, Engine, Engine]) -> None:
    with routed(*two[2:]) as (client, _):
        host, port = client.base_url.host, client.base_url.port
        assert port is not None
        with socket.create_connection((host, port), 30) as attacker, suppress(ConnectionError):
            attacker.sendall(b"GET /health HTTP/1.1\r\n")
            answer = b""
            for _ in range(2**10):
                attacker.sendall(b"a: b\r\n" * 100)
            answer = attacker.recv(65536)
            assert answer.startswith(b"HTTP/1.1 431 ")
            assert not attacker.recv(65536)
        assert client.get("/health").status_code == 200


def test_a_client_that_does_not_read_ends_its_request() -> None:
    """The engine's answer is larger than all buffers between."""
    engine = FakeEngine(pieces=(b"x" * 2**20,) * 64, waits=True)
    with served(engine) as url, routed(Engine(url), config=RouteConfig(write_deadline_s=0.2, drain_s=1)) as (client, _):
        host, port = client.base_url.host, client.base_url.port
        assert port is not None
        body = b'{"model": "base", "prompt": "a"}'
        with socket.create_connection((host, port), 30) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: here\r\ncontent-length: %d\r\n\r\n" % len(body))
            slow.sendall(body)
            until(lambda: "pagedkv_route_left_total 1.0" in client.get("/metrics").text)


def test_results_of_tools_with_several_texts_are_lines_as_in_vllm() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    said = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": parts}]}
    question = as_question("/v1/messages", {"model": "base", "messages": [said]})
    assert isinstance(question, dict)
    assert question["messages"] == [{"role": "tool", "tool_call_id": "t", "content": "one\ntwo"}]


def test_the_library_as_the_page_shows_it(two: tuple[FakeEngine, FakeEngine, Engine, Engine]) -> None:
    page = Path(__file__).parents[2] / "docs" / "route.md"
    shown = page.read_text().partition("## In Python")[2].split("```")[1].removeprefix("py\n")
    function, _, _ = shown.partition("\nwith EngineRouter(")
    names: dict[str, Any] = {}
    exec(function, names)  # noqa: S102 - the project's own page
    first, second, one, other = two
    for engine in (first, second):
        engine.pieces = (b"data: {}\n\n", b"data: [DONE]\n\n")
    with EngineRouter([one, other]) as router:
        for _ in range(3):
            assert names["ask"](router, list(range(100))) == "data: {}\n\ndata: [DONE]\n"
        assert sorted(len(each.asked) for each in (first, second)) == [0, 3], "where it was sent before"
        assert not any(each.num_waiting + each.num_decoding for each in router.statuses())
