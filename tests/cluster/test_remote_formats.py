"""A format that is checked at the front constrains the answer on a replica."""

import pickle
from collections.abc import Mapping
from typing import Any

import pytest

from pagedkv.cluster.messages import RoutedRequest
from pagedkv.engine import Intent, SamplingParams
from pagedkv.errors import RequestError
from pagedkv.server.answer_formats import AnswerFormats, FormatSource, RemoteFormats, with_matchers
from tests.server.serving import END_ID, TOKENIZER, VOCABULARY_SIZE, Script, local_engine, make_service


@pytest.fixture(scope="module")
def formats() -> AnswerFormats:
    return AnswerFormats(TOKENIZER, VOCABULARY_SIZE, [END_ID], "hermes")


def test_a_replica_holds_the_answer_to_the_format(formats: AnswerFormats) -> None:
    wanted: Mapping[str, Any] = {"type": "regex", "regex": "[a-c]{3,5}"}
    source = RemoteFormats(formats).matcher(wanted)
    assert isinstance(source, FormatSource)
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=1, logits_processors=(source,))
    request = RoutedRequest(0, TOKENIZER("why", return_tensors="np")["input_ids"][0], params, Intent())
    arrived: RoutedRequest = pickle.loads(pickle.dumps(request))  # noqa: S301 - pickled here
    llm = local_engine(make_service(Script())).llm
    output = llm.generate([arrived.prompt_token_ids.tolist()], with_matchers(arrived.params, formats))[0]
    text = str(output.completions[0].text)
    assert 3 <= len(text) <= 5
    assert set(text) <= set("abc")


def test_a_free_answer_has_no_matcher_and_a_wrong_format_is_refused(formats: AnswerFormats) -> None:
    remote = RemoteFormats(formats)
    assert remote.matcher(None) is None
    assert remote.matcher({"type": "text"}) is None
    with pytest.raises(RequestError):
        remote.matcher({"type": "regex", "regex": "("})
    free = SamplingParams(max_tokens=3)
    assert with_matchers(free, formats) is free
