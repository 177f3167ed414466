"""Coding agents do a task of three turns with their own tools, unchanged, against a scripted model.

Each is installed by `make test-clients` and started as a user starts it, in an empty folder and with a home of its own.
It has to send its tools, run what the model calls, and send back what that printed, twice.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from tests.clients.scripted import DONE, FIRST, PRINT_FIRST, PRINT_SECOND, SECOND, TASK, call_of, playing

INSTALLED: Final = Path(os.environ.get("PAGEDKV_CLIENTS", "."))
PATIENCE_S: Final = 900.0


def asked(command: Sequence[object], home: Path, url: str, **environment: str) -> str:
    """Run a client on the task in ``home/work``; return what it printed."""
    work = home / "work"
    variables = {
        "PATH": f"{INSTALLED / 'node_modules/.bin'}:{INSTALLED / 'bin'}:{os.environ['PATH']}",
        "HOME": str(home),
        "OPENAI_API_KEY": "none",
        "OPENAI_BASE_URL": f"{url}/v1",
        **environment,
    }
    done = subprocess.run(
        [str(part) for part in command],
        cwd=work,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=PATIENCE_S,
        check=False,
    )
    said = done.stdout.decode(errors="replace")
    assert done.returncode == 0, said
    return said


def calls(name: str, key: str, **more: object) -> list[str]:
    """Return the answers of a model that prints by a tool which takes a shell command as ``key``."""
    return [call_of(name, **{key: printing}, **more) for printing in (PRINT_FIRST, PRINT_SECOND)] + [DONE]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path


def require_done(home: Path, played: Sequence[str], answers: Sequence[str]) -> None:
    """Require that each answer was asked for in turn, and that both commands ran."""
    assert [said for said in played if said in answers] == list(answers)
    assert (home / "work" / "first.txt").read_text() == f"{FIRST}\n"
    assert (home / "work" / "second.txt").read_text() == f"{FIRST}\n{SECOND}\n"


def test_codex_calls_its_tools_over_responses(home: Path) -> None:
    answers = calls("exec_command", "cmd")
    with playing(lambda _: answers) as (url, player):
        ours = f'model_providers.ours={{name="ours",base_url="{url}/v1",wire_api="responses",env_key="OPENAI_API_KEY"}}'
        options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", "small"]
        said = asked(["codex", "exec", *options, "-c", "model_provider=ours", "-c", ours, TASK], home, url)
    assert DONE in said
    require_done(home, player.played, answers)


def test_qwen_code_calls_its_tools_over_chat(home: Path) -> None:
    answers = calls("run_shell_command", "command", is_background=False)
    with playing(lambda _: answers) as (url, player):
        command = ["qwen", "--yolo", "--auth-type", "openai", "--model", "small", "-p", TASK]
        said = asked(command, home, url, OPENAI_MODEL="small")
    assert DONE in said
    require_done(home, player.played, answers)


def test_opencode_calls_its_tools_over_chat(home: Path) -> None:
    answers = calls("bash", "command", description="prints")
    with playing(lambda _: answers) as (url, player):
        model = {"name": "small", "tool_call": True, "limit": {"context": 60_000, "output": 2_000}}
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
            "models": {"small": model},
        }
        settings = {"provider": {"ours": provider}, "permission": {"bash": "allow"}, "autoupdate": False}
        (home / "work" / "opencode.json").write_text(json.dumps(settings))
        said = asked(["opencode", "run", "-m", "ours/small", TASK], home, url)
    assert DONE in said
    require_done(home, player.played, answers)


EDIT: Final = """\
second.txt
```
<<<<<<< SEARCH
{old}=======
{new}
>>>>>>> REPLACE
```
"""


def test_aider_edits_until_its_check_passes(home: Path) -> None:
    """Aider has no tools: its model edits files, and the output of a failed check is the next turn's prompt."""
    check = "import pathlib; t = pathlib.Path('second.txt').read_text(); "
    check += f"print({{'one': '{FIRST}', 'two': '{SECOND}'}}.get(t.strip(), 'fine')); raise SystemExit(t != 'three\\n')"
    edits = [EDIT.format(old=old, new=new) for old, new in (("", "one"), ("one\n", "two"), ("two\n", "three"))]
    (home / "work" / "check.py").write_text(check)
    (home / "work" / "second.txt").write_text("")
    with playing(lambda _: edits) as (url, player):
        options = ["--no-git", "--yes-always", "--no-show-model-warnings", "--no-check-update", "--analytics-disable"]
        checked = ["--auto-test", "--test-cmd", f"{sys.executable} check.py", "--no-stream", "--map-tokens", "0"]
        model = ["--model", "openai/small", "--edit-format", "diff"]
        command = ["aider", *model, *options, *checked, "--message", TASK, "second.txt"]
        asked(command, home, url, OPENAI_API_BASE=f"{url}/v1")
    assert [said for said in player.played if said in edits] == edits
    assert (home / "work" / "second.txt").read_text() == "three\n"
