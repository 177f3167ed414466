"""Batches: each line has its answer, in order; lines that are no requests are told before a model is loaded."""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from tests.cli.command import run

FACTS: Final = "blue lamp: shelf 12. green cup: drawer 3. grey jar: closet 9. red kite: locker 7. Where? red kite:"


def line(custom_id: str, url: str, **body: object) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + "\n"


def test_each_line_has_its_answer_in_order(tmp_path: Path) -> None:
    given, results = tmp_path / "requests.jsonl", tmp_path / "results.jsonl"
    chat = [{"role": "user", "content": FACTS}]
    short = {"model": "demo", "temperature": 0}
    given.write_text(
        line("chat", "/v1/chat/completions", messages=chat, max_tokens=2, **short)
        + line("refused", "/v1/completions", prompt=FACTS, model="other")
        + "\n"
        + "".join(line(f"text {number}", "/v1/completions", prompt=FACTS, max_tokens=2, **short) for number in range(9))
        + line("response", "/v1/responses", input=FACTS, max_output_tokens=2, **short)
        + line("message", "/v1/messages", messages=chat, max_tokens=2, **short)
    )
    ended = run("run-batch", "-i", given, "-o", results, "--max-sequences", 2)
    assert ended.exit_code == 1
    assert "12 of 13 requests were answered" in ended.stderr
    rows: list[dict[str, Any]] = [json.loads(row) for row in results.read_text().splitlines()]
    names = ["chat", "refused", *(f"text {number}" for number in range(9)), "response", "message"]
    assert [row["custom_id"] for row in rows] == names
    assert len({row["id"] for row in rows}) == 13
    bodies = {row["custom_id"]: row["response"]["body"] for row in rows}
    assert bodies["chat"]["choices"][0]["message"]["content"].split() == ["locker", "7"]
    assert {bodies[f"text {number}"]["choices"][0]["text"].strip() for number in range(9)} == {"locker 7"}
    assert bodies["response"]["output"][0]["content"][0]["text"].strip() == "locker 7"
    assert bodies["message"]["content"][0]["text"].strip() == "locker 7"
    assert rows[1]["response"]["status_code"] == 404
    assert rows[1]["error"]["code"] == "model_not_found"
    assert [row["error"] for row in rows if row["custom_id"] != "refused"] == [None] * 12


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no request"),
        ("{", "1: is no JSON"),
        (line("a", "/v1/completions") + "[1]", "2: is no request of a batch"),
        (line("a", "/v1/images/generations"), "1: is no request of a batch"),
        (line("a", "/v1/completions", stream=True), "1: asks for a stream"),
        (line("a", "/v1/completions").replace("POST", "GET"), "1: is no request of a batch"),
    ],
)
def test_what_is_no_batch_is_told_with_its_line(tmp_path: Path, text: str, reason: str) -> None:
    given = tmp_path / "requests.jsonl"
    given.write_text(text)
    ended = run("run-batch", "-i", given, "-o", tmp_path / "results.jsonl")
    assert ended.exit_code == 2
    assert reason in ended.stderr.replace("\n", "")
    assert not (tmp_path / "results.jsonl").exists()


def test_the_results_need_a_place(tmp_path: Path) -> None:
    ended = run("run-batch", "-i", tmp_path / "missing", "-o", tmp_path / "none" / "results.jsonl")
    assert ended.exit_code == 2
    assert "there is no folder" in ended.stderr.replace("\n", "")
