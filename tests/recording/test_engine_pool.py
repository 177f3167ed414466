"""What a running engine tells of its cache is where a plan begins."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from pagedkv.errors import ConfigurationError, RecordingError
from pagedkv.planner.recording.engine_pool import EnginePool, read_engine
from tests.cli.command import run

pytestmark = pytest.mark.plain_only

INFO = (
    'vllm:cache_config_info{{block_size="{size}",cache_dtype="{dtype}",engine="{engine}",num_gpu_blocks="{num}"}} 1.0\n'
)


def vllm_pages(model: str = "a/model", dtype: str = "auto", nums: tuple[int, ...] = (1000,)) -> dict[str, str]:
    text = "# TYPE vllm:cache_config_info gauge\n"
    text += "".join(INFO.format(size=16, dtype=dtype, engine=engine, num=num) for engine, num in enumerate(nums))
    return {"/metrics": text, "/v1/models": json.dumps({"data": [{"id": "served", "root": model}]})}


def sglang_pages(**told: object) -> dict[str, str]:
    info = {"model_path": "a/model", "page_size": 64, "kv_cache_dtype": "auto", "max_total_num_tokens": 6400}
    return {"/metrics": "sglang:token_usage 0.0\n", "/get_server_info": json.dumps({**info, **told})}


@contextmanager
def engine(pages: dict[str, str]) -> Iterator[str]:
    """Serve pages; every other one is absent."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.get(self.path)
            self.send_response(404 if page is None else 200)
            self.end_headers()
            self.wfile.write((page or "").encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    ("pages", "pool"),
    [
        (vllm_pages(), EnginePool("a/model", 1000, 16, None)),
        (vllm_pages(dtype="fp8_e4m3", nums=(1000, 900)), EnginePool("a/model", 900, 16, "fp8")),
        (sglang_pages(), EnginePool("a/model", 100, 64, None)),
        (
            sglang_pages(max_total_num_tokens=None, internal_states=[{"max_total_num_tokens": 6400}], page_size=1),
            None,
        ),
        (sglang_pages(kv_cache_dtype="fp8_e5m2"), EnginePool("a/model", 100, 64, "fp8")),
    ],
)
def test_the_cache_of_an_engine_is_read(pages: dict[str, str], pool: EnginePool | None) -> None:
    if pool is None:
        told = json.loads(pages["/get_server_info"])
        del told["max_total_num_tokens"]
        pages, pool = {**pages, "/get_server_info": json.dumps(told)}, EnginePool("a/model", 6400, 1, None)
    with engine(pages) as url:
        assert read_engine(f"{url}/") == pool


@pytest.mark.parametrize(
    ("pages", "told"),
    [
        ({}, "cannot be read: Not Found"),
        ({"/metrics": "something 1\n"}, "has no vllm:cache_config_info"),
        (vllm_pages(dtype="nvfp4"), "keys and values are 'nvfp4', a type that is not known here"),
        (vllm_pages(nums=(0,)), "num_gpu_blocks is '0', no number above 0"),
        ({**vllm_pages(), "/v1/models": "<html>"}, "is no JSON"),
    ],
)
def test_an_engine_that_tells_no_cache_is_refused_with_what_was_seen(pages: dict[str, str], told: str) -> None:
    with engine(pages) as url, pytest.raises(RecordingError, match=told):
        read_engine(url)


def test_an_address_must_be_one() -> None:
    with pytest.raises(ConfigurationError, match="is no address of a page"):
        read_engine("localhost:8000")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows = [
        {"timestamp": 1000 * number, "input_length": 1024, "output_length": 8, "hash_ids": [1, number + 2]}
        for number in range(4)
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def planned(trace: Path, *options: str) -> dict[str, Any]:
    ended = run("plan", trace, *options, "--eviction", "lru", "--load", "1", "--jobs", 1, "--json", "-")
    assert ended.exit_code == 0, ended.output
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def test_a_plan_begins_with_what_the_engine_has(trace: Path) -> None:
    with engine(vllm_pages("llama-3.1-8b", nums=(8192,))) as url:
        plan = planned(trace, "--engine", url)
    assert plan["model"] == "llama-3.1-8b"
    assert [each["choices"]["memory"] for each in plan["settings"]] == ["16 GiB", "8 GiB", "32 GiB"]


def test_what_is_typed_counts(trace: Path) -> None:
    with engine(vllm_pages("unknown/model", dtype="fp8")) as url:
        plan = planned(trace, "--engine", url, "--model", "llama-3.1-8b", "--memory", "4", "--block-size", "32")
    assert plan["model"] == "llama-3.1-8b"


@pytest.mark.parametrize(
    ("model", "told"),
    [("gemma-3-27b", "2 kinds of layers of gemma-3-27b"), ("unknown/model", "unknown/model")],
)
def test_what_the_engine_does_not_tell_is_asked_for(trace: Path, model: str, told: str) -> None:
    with engine(vllm_pages(model)) as url:
        ended = run("plan", trace, "--engine", url)
    assert ended.exit_code != 0
    assert told in " ".join(ended.output.split())


def test_a_plan_needs_a_model_or_an_engine(trace: Path) -> None:
    assert "name the model to plan for" in run("plan", trace, "--memory", "4").output
