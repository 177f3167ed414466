"""Commands and options by their old names are refused with the new ones, options by the commands that have them."""

import pytest

from tests.cli.command import run

EVICTING = ("replay", "curve", "plan", "report", "generate")


@pytest.mark.parametrize("name", EVICTING)
@pytest.mark.parametrize("typed", [["--policy", "lru"], ["--policy=lru"]])
def test_an_old_name_is_refused_with_the_new_one(name: str, typed: list[str]) -> None:
    ended = run(name, "trace.jsonl", *typed)
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert ended.stderr == "pagedkv: --policy is called --eviction now\n"


def test_the_speed_of_a_trace_is_a_load() -> None:
    assert run("replay", "trace.jsonl", "--speed", "2").stderr == "pagedkv: --speed is called --load now\n"


def test_one_request_at_a_time_is_one_sequence() -> None:
    ended = run("replay", "trace.jsonl", "--one-at-a-time")
    assert (ended.exit_code, ended.stderr) == (2, "pagedkv: --one-at-a-time is called --max-sequences 1 now\n")


def test_a_command_without_the_option_knows_neither_name() -> None:
    ended = run("convert", "trace.jsonl", "--policy", "lru")
    assert ended.exit_code == 2
    assert "--eviction" not in ended.stderr


def test_behind_two_dashes_nothing_is_an_option() -> None:
    assert "called" not in run("replay", "--", "--policy").stderr


def test_a_command_that_is_gone_is_refused_with_what_does_the_same() -> None:
    ended = run("demo-replay", "--sessions", 5)
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert (
        ended.stderr == "pagedkv: demo-replay is gone: pagedkv replay examples/conversations.jsonl.gz does the same\n"
    )
