"""An engine that is built for a server has the draft model that it was named."""

from pagedkv.engine import EngineConfig, SamplingParams
from pagedkv.engine.demo.trained import FOLDER
from pagedkv.server.engines import build_engine


def test_a_draft_model_is_loaded_beside_the_model() -> None:
    config = EngineConfig(num_blocks=100, num_draft_tokens=3)
    prompt, params = [*range(5, 25)], SamplingParams(max_tokens=13, ignore_eos=True)
    alone, _ = build_engine(None, "float32", EngineConfig(num_blocks=100), None)
    drafted, tokenizer = build_engine(None, "float32", config, None, draft_model=str(FOLDER))
    (expected,), (output,) = (llm.generate([prompt], params) for llm in (alone, drafted))
    assert output.token_ids == expected.token_ids
    assert output.num_accepted_tokens == output.num_drafted_tokens == 9
    assert tokenizer.decode(list(output.token_ids)) == expected.completions[0].text
