"""Session files of agents: what each call's prompt begins with, where users go back, after a compaction, in folders."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv.errors import TraceError
from pagedkv.planner.traces.reader import TraceReader
from pagedkv.planner.traces.request import Request
from tests.cli.command import run
from tests.traces.test_samples import SAMPLES

SESSION = "s1"


def row(number: int, parent: int | None, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - keys of a row
    linked = {"uuid": f"u{number}", "parentUuid": None if parent is None else f"u{parent}", "isSidechain": False}
    return {**linked, "sessionId": SESSION, "timestamp": f"2026-03-01T09:{number:02d}:00.000Z", **more}


def user(number: int, parent: int | None, content: object) -> dict[str, Any]:
    return row(number, parent, type="user", message={"role": "user", "content": content})


def said(number: int, parent: int, text: str, num_prompt: int, *, usage: int = 10) -> dict[str, Any]:
    message = {
        "id": f"msg{number}",
        "role": "assistant",
        "content": [{"type": "text", "text": text}],
        "usage": {"input_tokens": num_prompt, "output_tokens": usage},
    }
    return row(number, parent, type="assistant", message=message)


def words(seed: int, num: int = 40) -> str:
    return " ".join(f"w{number:05d}" for number in random.Random(seed).sample(range(99_999), num))


def read(path: Path, rows: list[Any], name: str = "session.jsonl") -> list[Request]:
    (path / name).write_text("".join(json.dumps(each) + "\n" for each in rows))
    with TraceReader(path / name) as trace:
        return list(trace)


def expect_ids(request: Request) -> list[int]:
    assert request.block_ids is not None
    ids: list[int] = request.block_ids.tolist()
    return ids


def common(one: Request, other: Request) -> int:
    """Tokens of prompt and answer of one that the prompt of the other begins with."""
    assert one.prompt_token_ids is not None
    assert one.output_token_ids is not None
    assert other.prompt_token_ids is not None
    first = np.concatenate([one.prompt_token_ids, one.output_token_ids])
    num = min(len(first), len(other.prompt_token_ids))
    differ = np.flatnonzero(first[:num] != other.prompt_token_ids[:num])
    return int(differ[0]) if len(differ) else num


def test_a_prompt_is_all_that_its_session_said_before(tmp_path: Path) -> None:
    one, two, three = read(
        tmp_path,
        [
            user(1, None, words(1)),
            said(2, 1, words(2), 1000, usage=90),
            user(3, 2, words(3)),
            said(4, 3, words(4), 1180, usage=90),
            user(5, 4, words(5)),
            said(6, 5, "Done.", 1360),
        ],
    )
    assert common(one, two) == 1000 + 90
    assert common(two, three) == 1180 + 90


def test_a_user_who_goes_back_leaves_the_later_turns_out(tmp_path: Path) -> None:
    one, two, again = read(
        tmp_path,
        [
            user(1, None, words(1)),
            said(2, 1, words(2), 1000, usage=90),
            user(3, 2, words(3)),
            said(4, 3, words(4), 1180, usage=90),
            user(5, 2, words(5)),
            said(6, 5, "Done.", 1180),
        ],
    )
    assert common(one, again) == 1000 + 90
    assert 1090 <= common(two, again) < 1100, "no more than the mark of the user's turn"


def called(number: int, parent: int, name: str) -> dict[str, Any]:
    call = said(number, parent, "", 1000)
    call["message"] |= {"id": "msg2", "content": [{"type": "tool_use", "id": name, "name": "Read", "input": {}}]}
    return call


def result(number: int, parent: int, name: str, seed: int) -> dict[str, Any]:
    return user(number, parent, [{"type": "tool_result", "tool_use_id": name, "content": words(seed)}])


def test_results_of_calls_side_by_side_are_all_in_the_next_prompt(tmp_path: Path) -> None:
    begun = [user(1, None, words(1)), called(2, 1, "t"), called(3, 2, "v")]
    end = [result(5, 3, "v", 5), said(6, 5, "Done.", 1300)]
    _, one = read(tmp_path, [*begun, result(4, 2, "t", 4), *end])
    _, other = read(tmp_path, [*begun, result(4, 2, "t", 7), *end])
    assert 1010 <= common(one, other) < 1060, "the result of the first call counts, though no later row links to it"


def test_a_compacted_session_begins_anew(tmp_path: Path) -> None:
    one, two = read(
        tmp_path,
        [
            user(1, None, words(1)),
            said(2, 1, words(2), 3000, usage=90),
            row(3, None, type="system", subtype="compact_boundary", logicalParentUuid="u2"),
            user(4, 3, "In short: " + words(3)),
            said(5, 4, "Done.", 3050),
        ],
    )
    assert 2900 < common(one, two) < 2950, "what the file leaves out is shared, and nothing else"


def test_an_answer_that_is_told_shorter_than_its_text_is_counted(tmp_path: Path) -> None:
    one, two = read(
        tmp_path,
        [user(1, None, words(1)), said(2, 1, words(2), 1000, usage=1), user(3, 2, words(3)), said(4, 3, "Done.", 1180)],
    )
    assert one.output_length == len(words(2)) // 4 + 1, "the first rows of an answer have a count that is not final"
    assert common(one, two) == 1000 + one.output_length


def test_a_folder_of_sessions_is_one_trace_in_order_of_arrival(tmp_path: Path) -> None:
    folder = tmp_path / "projects" / "-home-ann"
    folder.mkdir(parents=True)
    read(folder, [user(5, None, words(1)), said(6, 5, "Done.", 400)], "a.jsonl")
    (folder / "index.json").write_text('{\n "version": 1\n}\n')
    other = [user(1, None, words(2)), said(2, 1, "Done.", 500)]
    read(folder, [{**each, "sessionId": "s2"} for each in other], "b.jsonl")
    result = run("replay", tmp_path / "projects", "--model", "llama-3.1-8b", "--gpu", "h100", "--json", "-")
    assert result.exit_code == 0, result.stderr
    replay = json.loads(result.stdout)
    assert replay["requests"]["num_prompt_tokens"] == 900
    assert replay["hits"]["num_hit_tokens"] == 0
    written = run("convert", tmp_path / "projects", "-o", tmp_path / "trace.jsonl")
    assert written.exit_code == 0, written.stderr
    with TraceReader(tmp_path / "trace.jsonl") as trace:
        assert [each.input_length for each in trace] == [500, 400]


def test_weka_files_of_a_folder_are_sessions(tmp_path: Path) -> None:
    session = json.loads((SAMPLES / "weka.json").read_text())
    for number in (1, 2):
        (tmp_path / f"trace_{number}.json").write_text(json.dumps({**session, "id": f"t{number}"}, indent=1))
    with TraceReader(tmp_path) as trace:
        sessions = [list(each) for each in trace.sessions()]
    ids = [{int(name) for request in each for name in expect_ids(request)} for each in sessions]
    assert [len(each) for each in sessions] == [4, 4]
    assert not ids[0] & ids[1], "ids are a session's own"


def test_a_subagents_times_may_be_on_the_clock_of_its_session(tmp_path: Path) -> None:
    """Files of kv-cache-tester have times since the subagent's begin; AIPerf says that later captures do not."""
    own = json.loads((SAMPLES / "weka.json").read_text())
    shared = json.loads((SAMPLES / "weka.json").read_text())
    begin_s, requests = shared["requests"][1]["t"], shared["requests"][1]["requests"]
    for each in requests:
        each["t"] += begin_s
    arrivals = []
    for number, session in enumerate((own, shared)):
        (tmp_path / f"{number}.json").write_text(json.dumps(session))
        with TraceReader(tmp_path / f"{number}.json") as trace:
            arrivals.append([each.arrival_s for each in trace])
    assert arrivals[0] == arrivals[1]


def test_agents_within_a_weka_session_may_number_on_their_own(tmp_path: Path) -> None:
    session = json.loads((SAMPLES / "weka.json").read_text())
    (tmp_path / "trace.json").write_text(json.dumps({**session, "hash_id_scope": "per_context"}))
    with TraceReader(tmp_path / "trace.json") as trace:
        first, agent, *_ = list(trace)
    assert not set(expect_ids(first)) & set(expect_ids(agent))


def test_a_folder_without_logs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "readme.md").write_text("nothing")
    with pytest.raises(TraceError, match="the folder has no file that ends in"):
        TraceReader(tmp_path)


def test_rows_of_another_kind_are_skipped_and_counted(tmp_path: Path) -> None:
    request = {"ts": 1772355600, "messages": [{"role": "user", "content": words(1)}]}
    rows = [{"event": "started"}, request, {"event": "heartbeat", "ts": 1772355601}, {**request, "ts": 1772355602}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    with TraceReader(tmp_path / "log.jsonl") as trace:
        assert len(list(trace)) == 2
        assert "(rows of another kind, skipped: 1)" in trace.recognised
        assert "rows of another kind before the first request, skipped: 1" in trace.notes
