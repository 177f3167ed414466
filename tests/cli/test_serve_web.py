"""A server behind a proxy, with names, keys, TLS and a chat template from the command line; paths for operators.

``tls`` has a certificate of 127.0.0.1, signed by itself, for these tests alone.
"""

import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from pagedkv.cli.commands.serve import WebOptions
from pagedkv.engine.demo.babbling import WRITTEN, babbling_tokenizer
from pagedkv.errors import ConfigurationError
from pagedkv.server import SharedKeys
from pagedkv.server.http import ApiError
from pagedkv.simulation.calibration import read_steps
from tests.cli.command import run, start

TLS: Final = Path(__file__).parent / "tls"
CERTIFICATE: Final = TLS / "certificate.pem"
PATIENCE_S: Final = 300.0
TEMPLATE: Final = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the server's files."""
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx.Client]:
    """Ask a served demonstration, as behind a proxy that leaves the path as it is."""
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    options = ("--port", 0, "--api-key", "one", "--api-key", "two", "--root-path", "/llm", "--chat-template", template)
    names = ("--served-model-name", "first", "--served-model-name", "second")
    encrypted = ("--ssl-certfile", CERTIFICATE, "--ssl-keyfile", TLS / "key.pem")
    logged = ("--step-log", folder / "steps.jsonl")
    process = start("serve", "--demo", "chat", *options, *names, *encrypted, *logged)
    assert process.stderr is not None
    told = (line.decode() for line in process.stderr)
    try:
        address = next(line.split(" at ")[1].split()[0] for line in told if "is served at" in line)
        assert address.startswith("https://127.0.0.1:")
        verified = ssl.create_default_context(cafile=CERTIFICATE)
        headers = {"Authorization": "Bearer two"}
        base = address.removesuffix("/v1") + "/llm"
        with httpx.Client(base_url=base, verify=verified, headers=headers, timeout=PATIENCE_S) as client:
            yield client
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)
        process.stderr.close()


def ask(client: httpx.Client, path: str, **body: object) -> Any:  # noqa: ANN401 - JSON
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_requests_may_give_each_name(client: httpx.Client) -> None:
    assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["first", "second"]
    assert client.get("/v1/models/second").json()["id"] == "second"
    for name in ("first", "second"):
        assert ask(client, "/v1/completions", model=name, prompt="x", max_tokens=1)["model"] == "first"
    assert client.post("/v1/completions", json={"model": "third", "prompt": "x"}).status_code == 404


def test_steps_are_logged_while_the_server_runs(client: httpx.Client, folder: Path) -> None:
    """Those of an answer are there before its last token is."""
    before = len((folder / "steps.jsonl").read_text().splitlines())
    ask(client, "/v1/completions", model="first", prompt="x" * 40, max_tokens=5, ignore_eos=True)
    steps = read_steps(str(folder / "steps.jsonl"))
    assert steps.num_new_tokens[before] > 5  # the prompt
    assert steps.num_new_tokens[before + 1 :].tolist() == [1] * 4


def test_each_key_is_known_and_others_are_refused(client: httpx.Client) -> None:
    for key, status in (("one", 200), ("two", 200), ("three", 401)):
        assert client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == status


def test_paths_are_found_with_and_without_that_of_the_proxy(client: httpx.Client) -> None:
    bare = str(client.base_url).removesuffix("/llm/")
    assert client.get(f"{bare}/v1/models").json() == client.get("/v1/models").json()
    for base in (bare, bare + "/llm"):
        refused = client.post(f"{base}/v1/messages", json={"model": "first"}).json()
        assert refused["type"] == "error"  # in Anthropic's form


def test_the_template_is_the_given_one(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "red"}, {"role": "user", "content": "lamp"}]
    plain = ask(client, "/tokenize", prompt="redlamp", add_special_tokens=False)["tokens"]
    assert ask(client, "/tokenize", messages=messages)["tokens"] == plain


def test_a_reset_drops_what_is_cached(client: httpx.Client) -> None:
    def cached() -> int:
        usage = ask(client, "/v1/completions", prompt="red lamp, " * 9, max_tokens=1)["usage"]
        num_cached: int = usage["prompt_tokens_details"]["cached_tokens"]
        return num_cached

    cached()
    assert cached() > 0
    assert client.post("/reset_prefix_cache").json() == {"success": True}
    assert cached() == 0


def test_the_demonstration_can_be_benchmarked(client: httpx.Client) -> None:
    """Any text is taken, whole conversations too; answers are as long as they may be, and each token has text."""
    assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 32_768
    usage = ask(client, "/v1/completions", prompt="Any téxt, again. " * 100, max_tokens=1)["usage"]
    assert usage["prompt_tokens"] == 1800
    messages = [{"role": "user", "content": "Write a poem."}]
    body = {"messages": messages, "max_tokens": 32, "stream": True, "stream_options": {"include_usage": True}}
    lines = client.post("/v1/chat/completions", json=body).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])
    assert len(text) == events[-1]["usage"]["completion_tokens"] == 32
    assert set(text) <= set(WRITTEN)


def test_its_conversations_have_roles() -> None:
    messages = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "No."}]
    tokenizer: Any = babbling_tokenizer()
    told = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert told == "<s>user: Hi.\nassistant: No.\nassistant: "
    assert tokenizer.decode(tokenizer.encode("é€x𝄞\n")) == "é€x𝄞\n"


def test_operators_see_what_runs(client: httpx.Client) -> None:
    assert client.get("/ping").status_code == client.post("/ping").status_code == 200
    assert client.get("/load").json() == {"server_load": 0}
    told = client.get("/server_info").json()
    assert told["models"] == ["first", "second"]
    assert told["max_model_len"] == client.get("/v1/models").json()["data"][0]["max_model_len"]
    assert "the model is not compiled" in told["engine"]


def test_a_template_that_cannot_be_parsed_ends_the_start(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}")
    process = start("serve", "--port", 0, "--chat-template", template)
    _, told = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert b"--chat-template cannot be used: Unexpected end of template" in told


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--ssl-keyfile", TLS / "key.pem"), "need --ssl-certfile"),
        (("--ssl-certfile", TLS / "missing.pem"), "missing.pem cannot be used"),
        (("--ssl-certfile", CERTIFICATE, "--ssl-keyfile", CERTIFICATE), "cannot be used"),
        (("--chat-template", TLS / "missing.jinja"), "missing.jinja cannot be read"),
        (("--root-path", "llm"), "--root-path must begin with /"),
        (("--api-key", "a", "--api-keys", TLS / "keys.toml"), "keys.toml"),
    ],
)
def test_options_that_cannot_be_are_refused(options: tuple[object, ...], reason: str) -> None:
    ended = run("serve", "--port", 0, *options)
    assert ended.exit_code == 2
    assert reason in ended.stderr.replace("\n", "")


def test_tls_asks_for_clients_certificates_if_told() -> None:
    web = WebOptions(ssl_certfile=CERTIFICATE, ssl_keyfile=TLS / "key.pem", ssl_ca_certs=CERTIFICATE, ssl_cert_reqs=2)
    assert web.encryption()["ssl_cert_reqs"] == 2
    with pytest.raises(ConfigurationError, match="--ssl-cert-reqs must be 0, 1 or 2"):
        WebOptions(ssl_certfile=CERTIFICATE, ssl_cert_reqs=3).encryption()


def test_shared_keys_have_one_caller() -> None:
    access = SharedKeys(["one", "two"])
    callers = [access.identify({"authorization": f"Bearer {key}"}) for key in ("one", "two")]
    assert {(each.tenant, each.salt, each.is_admin) for each in callers} == {(None, b"", True)}
    with pytest.raises(ApiError, match="not one of this server's"):
        access.identify({"x-api-key": "three"})
    with pytest.raises(ConfigurationError, match="no API key"):
        SharedKeys([""])
