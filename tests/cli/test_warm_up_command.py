"""``pagedkv warm-up``: what it refuses, before anything is compiled."""

from tests.cli.command import run


def test_an_unknown_target_is_refused_with_those_that_are_known() -> None:
    result = run("warm-up", "--target", "x86-64-v9")
    assert result.exit_code == 2
    assert "--target must be one of" in result.stderr
    assert "'x86-64-v9'" in result.stderr
