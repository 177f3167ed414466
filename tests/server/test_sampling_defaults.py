"""The model's own defaults of sampling hold where a request says nothing."""

import json
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from pagedkv.probe.compat import sampling_defaults
from tests.server.serving import Script, make_service, running

GREEDY: Final = {"temperature": 0.0}
PATHS: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 12},
    "/v1/completions": {"prompt": "x", "max_tokens": 12},
    "/v1/responses": {"input": "x", "max_output_tokens": 12},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 12},
}


def test_a_models_file_has_its_defaults(tmp_path: Path) -> None:
    given: Any = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "max_new_tokens": 9}
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    assert sampling_defaults(str(tmp_path)) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    (tmp_path / "generation_config.json").unlink()
    assert sampling_defaults(str(tmp_path)) == {}


@pytest.mark.parametrize("path", PATHS)
def test_requests_have_them_unless_they_say_otherwise(path: str) -> None:
    service = make_service(Script(), sampling_defaults=GREEDY)
    seen: list[float] = []
    service.on_arrived.append(lambda request: seen.append(request.params.temperature))
    with running(service) as url:
        for more in ({}, {"temperature": 0.5}):
            wish = {"model": "small", **PATHS[path], **more}
            assert httpx.post(f"{url}{path}", json=wish, timeout=60).status_code == 200
    assert seen == [0, 0.5]
