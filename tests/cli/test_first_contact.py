"""What somebody meets first: help by ``-h``, refusals before any work, a key of one's own."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from pagedkv.api_keys import read_key_file
from pagedkv.cli.app import SUMMARIES
from pagedkv.contract.extras import to_install
from pagedkv.errors import ConfigurationError
from pagedkv.model_folder import require_model
from tests.cli.command import run
from tests.cli.test_app import seeing_imports

pytestmark = pytest.mark.plain_only


@pytest.mark.parametrize("command", [(), *((name,) for name in SUMMARIES)])
def test_help_has_a_short_name(command: tuple[str, ...]) -> None:
    assert run(*command, "-h").stdout == run(*command, "--help").stdout


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--api-keys gone.toml", "the file of API keys gone.toml cannot be read: No such file or directory"),
        ("--api-keys broken.toml", "entry 1 of broken.toml needs the name of its tenant"),
        ("--memory 0", "--memory must be over 0"),
        ("--memory lots", "--memory must be a size such as 16GiB"),
        ("--num-blocks many", "--num-blocks must be a whole number"),
        ("--eviction none", "--eviction must be one of"),
        ("--max-body 32", "--max-body 32 has no unit: write 32MB"),
        ("--request-log gone/log.jsonl", "there is no folder gone"),
        ("--step-log gone/log.jsonl", "there is no folder gone"),
        ("--step-log log.jsonl --replicas 2", "--step-log needs --replicas 1"),
        ("--lora legal", "--lora must be NAME=PATH, each name once, got 'legal'"),
        ("--lora legal=gone", "--lora legal=gone: there is no folder gone"),
        ("--lora legal=. --replicas 2", "--lora needs --replicas 1"),
        ("--tier host", "a tier is host:SIZE"),
        ("--host 0.0.0.0", "--host 0.0.0.0 can be reached from other machines, and there are no API keys"),
        ("--host 203.0.113.77 --without-keys", "the server cannot listen at 203.0.113.77:8000"),
    ],
)
def test_a_server_refuses_wrong_options_before_torch_is_imported(
    options: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.toml").write_text("[[keys]]\n")
    code, (line,), seen = seeing_imports("serve", *options.split())
    assert code == 2
    assert told in line
    assert seen.isdisjoint({"torch", "transformers", "fastapi"})


class Hub(BaseHTTPRequestHandler):
    """A hub that has one model."""

    asked: list[str] = []  # noqa: RUF012 - of one test at a time

    def do_GET(self) -> None:
        """Answer what is asked of a model."""
        if "/models/" in self.path:  # its client asks for other things of its own
            self.asked.append(self.path)
        has_it = self.path == "/api/models/owner/there"
        body = json.dumps({"id": "owner/there", "siblings": [], "tags": []} if has_it else {"error": "none"}).encode()
        self.send_response(200 if has_it else 404)
        self.send_header("Content-Length", str(len(body)))
        if not has_it:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), Hub)
    Hub.asked.clear()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.usefixtures("hub")
def test_the_hub_is_asked_once_for_a_mistyped_model() -> None:
    require_model("owner/there")
    with pytest.raises(
        ConfigurationError, match="'owner/thee' is no folder here, and the hub of Hugging Face has none"
    ):
        require_model("owner/thee")
    assert Hub.asked == ["/api/models/owner/there", "/api/models/owner/thee"]


def test_a_hub_that_does_not_answer_is_not_asked_again(hub: HTTPServer) -> None:
    hub.socket.close()
    began = time.monotonic()
    with pytest.raises(ConfigurationError, match="not downloaded yet, and the hub of Hugging Face cannot be asked: "):
        require_model("owner/there")
    assert time.monotonic() - began < 60  # six tries for each file took 100 seconds
    with pytest.raises(ConfigurationError, match="and no name of a model of the hub"):
        require_model("no such model")


def test_a_new_key_and_its_entry(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    first = run("new-key", "team-a", "--file", file)
    second = run("new-key", 'the "others"', "--admin", "--file", file)
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert first.stdout.startswith("pk-")
    assert first.stdout.strip() not in file.read_text()
    owners = read_key_file(file).owners.values()
    assert [(owner.tenant, owner.is_admin) for owner in owners] == [("team-a", False), ('the "others"', True)]
    shown = run("new-key", "team-b")
    assert shown.stdout.startswith("pk-")
    assert '[[keys]]\ntenant = "team-b"\nsha256 = "' in shown.stderr
    file.write_text("[[keys]]\n")
    assert run("new-key", "team-a", "--file", file).exit_code == 2
    assert file.read_text() == "[[keys]]\n"


def test_an_extra_of_a_checkout_is_installed_from_there() -> None:
    assert to_install("cli") == f"pip install '.[cli]' in {Path(__file__).parents[2]}"
