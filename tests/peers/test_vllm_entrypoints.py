"""vLLM's own tests of its HTTP server against ``pagedkv serve`` with a random Llama: which cases fail, and why.

They run as they are in a process of their own, with a plugin in which `RemoteOpenAIServer` starts ours. A case that
fails and is not listed fails here, as does one that is listed and passes.
``python -m tests.peers.test_vllm_entrypoints FOLDER [FILE ...]``, with vLLM's source distribution, prints the number by
file and each case that failed, with what it said.
"""

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest

from tests.peers.vllm_suites import PEERS, Suite

FILES: Final = (
    "openai/chat_completion/test_batched_chat_completions.py",
    "openai/chat_completion/test_chat.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_completion_with_function_calling.py",
    "openai/chat_completion/test_enable_force_include_usage.py",
    "openai/chat_completion/test_include_reasoning.py",
    "openai/chat_completion/test_logprob_token_ids.py",
    "openai/chat_completion/test_root_path.py",
    "openai/chat_completion/test_thinking_token_budget.py",
    "openai/completion/test_completion.py",
    "openai/completion/test_prompt_validation.py",
    "openai/completion/test_token_in_token_out.py",
    "openai/models/test_models.py",
    "openai/responses/test_parsable_context.py",
    "openai/responses/test_simple.py",
    "openai/test_chunked_prompt.py",
    "openai/test_return_token_ids.py",
    "openai/test_return_tokens_as_ids.py",
    "serve/instrumentator/test_basic.py",
    "serve/instrumentator/test_metrics.py",
    "serve/instrumentator/test_orca_metrics.py",
    "serve/lora/test_lora_adapters.py",
    "serve/middleware/test_optional_middleware.py",
    "serve/tokenize/test_tokenization.py",
)
"""Of ``tests/entrypoints``: completions, chat, responses, models, tokenize, metrics, access, validation of prompts."""

RANDOM: Final = "needs a model that was trained: what it says, its thoughts or its calls are asked for"
ENDS: Final = "counts on where an answer ends, which is elsewhere with a random model"
FLAG: Final = "asks for an option of vllm serve that ours has not: "
ROUTE: Final = "asks for a path of vLLM's that ours has not: "
WORDS: Final = "looks for words of vLLM's; 400 here too"
WHOLE: Final = "asks for log-probabilities of the whole vocabulary (--max-logprobs); 20 are told here"
DETAILS: Final = "expects usage without details; ours has those of the cache in any case"
LOADING: Final = "adapters are given at the start (--lora), and not loaded by requests"
BUDGET: Final = "thoughts have no bound of their own here"
CHAT: Final = "openai/chat_completion"
METRICS: Final = "serve/instrumentator/test_metrics.py"
ORCA: Final = "serve/instrumentator/test_orca_metrics.py"
MIDDLEWARE: Final = "serve/middleware/test_optional_middleware.py"
LORA: Final = "serve/lora/test_lora_adapters.py"
EXPECTED: Final[Mapping[str, str]] = {
    f"{CHAT}/test_chat.py::test_more_than_one_prompt_logprobs_chat": "a token of its prompt must be the likeliest",
    f"{CHAT}/test_chat.py::test_single_chat_session": DETAILS,
    f"{CHAT}/test_chat.py::test_structured_outputs_choice_chat": "two draws must differ",
    f"{CHAT}/test_chat.py::test_structured_outputs_json_chat": ENDS,
    f"{CHAT}/test_chat.py::test_response_format_json_object": RANDOM,
    f"{CHAT}/test_chat.py::test_response_format_json_schema": RANDOM,
    f"{CHAT}/test_chat.py::test_complex_message_content": RANDOM,
    f"{CHAT}/test_chat.py::test_long_seed": WORDS,
    f"{CHAT}/test_chat.py::test_invocations": f"{ROUTE}/invocations",
    f"{CHAT}/test_chat_completion.py::test_kv_transfer": "caches are handed on by tiers here, not by requests",
    f"{CHAT}/test_chat_completion.py::test_per_request_metrics": f"{FLAG}--enable-per-request-metrics",
    f"{CHAT}/test_chat_echo.py::test_prompt_logprobs": WHOLE,
    f"{CHAT}/test_chat_echo.py::test_top_logprobs": WHOLE,
    f"{CHAT}/test_completion_with_function_calling.py::test_named_tool_use": ENDS,
    f"{CHAT}/test_include_reasoning.py::test_include_reasoning_true": RANDOM,
    f"{CHAT}/test_include_reasoning.py::test_reasoning_tokens_in_usage": RANDOM,
    f"{CHAT}/test_include_reasoning.py::test_default_includes_reasoning": RANDOM,
    f"{CHAT}/test_thinking_token_budget.py::test_thinking_token_budget_mixed_requests": BUDGET,
    f"{CHAT}/test_thinking_token_budget.py::test_thinking_token_budget_limits_reasoning": BUDGET,
    "openai/completion/test_completion.py::test_batch_completions": "beams are served in Python alone",
    "openai/completion/test_prompt_validation.py::test_empty_prompt": WORDS,
    "openai/responses/test_parsable_context.py::test_reasoning_and_function_items": RANDOM,
    "openai/responses/test_parsable_context.py::test_function_call_first_turn": RANDOM,
    "openai/responses/test_simple.py::test_enable_response_messages": "answers have items alone",
    "openai/responses/test_simple.py::test_reasoning_item": RANDOM,
    "openai/responses/test_simple.py::test_streaming_reasoning_tokens_e2e": RANDOM,
    "openai/responses/test_simple.py::test_non_streaming_reasoning_tokens_e2e": RANDOM,
    "openai/test_return_token_ids.py::test_chat_completion_with_tool_use": RANDOM,
    "openai/test_return_token_ids.py::test_comparison_with": ENDS,
    "openai/test_return_token_ids.py::test_chat_completion_with_emoji_and_token_ids": ENDS,
    "serve/instrumentator/test_basic.py::test_show_version": "expects the version of vLLM; ours tells its own",
    f"{METRICS}::test_metrics_counts": "tokens of a step are those that it computes: the last of an answer never is",
    f"{METRICS}::test_metrics_exist": "asks for images",
    f"{ORCA}::test_chat_completion_with_orca_header[True]": "asks for load in a header of answers",
    f"{ORCA}::test_completion_with_orca_header[True]": "asks for load in a header of answers",
    f"{ORCA}::test_single_completion[True]": DETAILS,
    f"{LORA}::test_dynamic_lora_lineage": LOADING,
    f"{LORA}::test_load_lora_adapter": LOADING,
    f"{LORA}::test_dynamic_lora_invalid_files": LOADING,
    f"{LORA}::test_dynamic_lora_badrequests": LOADING,
    f"{LORA}::test_multiple_lora_adapters": LOADING,
    f"{LORA}::test_loading_invalid_adapters": LOADING,
    f"{LORA}::test_beam_search_with_lora_adapters": LOADING,
    f"{MIDDLEWARE}::test_v2_endpoint": f"{ROUTE}/v2/embed, of Cohere's clients",
    f"{MIDDLEWARE}::test_enable_request_id_header": f"{FLAG}--enable-request-id-headers",
    f"{MIDDLEWARE}::test_custom_request_id_header": f"{FLAG}--enable-request-id-headers",
}
"""Cases that fail, and why, by the beginning of their names."""
UNSTEADY: Final = (
    f"{METRICS}::test_abort_metrics_reset",
    "serve/instrumentator/test_basic.py::test_server_load",
)
"""Cases that look within moments at requests under way, which end by themselves: they mostly pass."""
SUITE: Final = Suite(
    "tests/entrypoints",
    "vllm_entrypoints_plugin",
    ("--confcutdir=tests/entrypoints",),
    case_s=300,
    patience_s=3600,
)


@dataclass(frozen=True, slots=True)
class Case:
    """What became of a case.

    Args:
        name: file and case, from ``tests/entrypoints``.
        outcome: passed, failed or skipped.
        why: what it said where it failed.
    """

    name: str
    outcome: str
    why: str

    @property
    def reason(self) -> str | None:
        """Why it is expected to fail; None: it is not."""
        return next((reason for name, reason in EXPECTED.items() if self.name.startswith(name)), None)


def outcomes(vllm: Path, files: Sequence[str], work: Path) -> list[Case]:
    """Run files of theirs, and return what became of each case that asks a server.

    Args:
        vllm: folder of the source distribution; files: from ``tests/entrypoints``.
        work: an empty folder, for the model, its names in the hub's form, and logs.
    """
    environment = {
        "PAGEDKV_PYTHON": sys.executable,
        "PAGEDKV_SERVER_LOG": str(work / "server.log"),
        "PAGEDKV_SOURCE": str(PEERS.parents[1] / "src"),
        "PAGEDKV_VLLM": str(vllm),
        "PYTHONPATH": os.pathsep.join((str(vllm), str(PEERS))),
    }
    found = SUITE.outcomes(vllm, files, work, environment)
    return [Case(each["case"], each["outcome"], each["why"]) for each in found]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    return outcomes(SUITE.require_vllm(), FILES, tmp_path_factory.mktemp("entrypoints"))


def test_no_case_fails_but_those_that_are_listed(cases: list[Case]) -> None:
    assert cases, "no case ran"
    failed = [each for each in cases if each.outcome == "failed" and not each.name.startswith(UNSTEADY)]
    assert [each for each in failed if each.reason is None] == []


def test_what_is_listed_fails(cases: list[Case]) -> None:
    failed = {each.name for each in cases if each.outcome == "failed"}
    assert [name for name in EXPECTED if not any(each.startswith(name) for each in failed)] == []
    assert [each for each in cases if each.outcome == "passed" and each.reason is not None] == []


def main() -> None:
    """Print how many cases pass, by file, and those that fail, with what is known of each."""
    vllm, *files = sys.argv[1:]
    with TemporaryDirectory() as work:
        found = outcomes(Path(vllm), files or FILES, Path(work))
    counts = Counter((each.name.partition("::")[0], each.outcome) for each in found)
    names = dict.fromkeys(name for name, _ in counts)
    lines = [f"{counts[file, 'passed']:4d} passed {counts[file, 'failed']:4d} failed  {file}" for file in names]
    failed = [each for each in found if each.outcome == "failed"]
    lines += [f"\n{each.name}\n    {each.reason or each.why}" for each in failed]
    lines.append(f"\n{sum(each.outcome == 'passed' for each in found)} of {len(found)} passed\n")
    sys.stdout.write("\n".join(lines))


if __name__ == "__main__":
    main()
