"""A server whose model plays its part of a task of three turns, whatever client asks.

The part is chosen by what is in the prompt, latest first, so that it depends on no client's words. What a tool prints
is computed by it and in no answer, so an answer behind it shows that the client ran the tool and sent its result back::

    the task            answer 1   calls a tool, which prints FIRST
    ... FIRST           answer 2   calls a tool, which prints SECOND
    ... SECOND          answer 3   a text, the end

Clients ask for other things beside, such as a title: requests without tools get a text.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pagedkv.engine import LLM, EngineConfig
from pagedkv.engine.sampling import BatchSampler, Place, SampledTokens, WaitingRow
from pagedkv.server import LocalEngine, OpenAccess, ServerConfig, Service
from tests.server.serving import HERMES, SPECIAL, running

__all__ = ["DONE", "FIRST", "PRINT_FIRST", "PRINT_SECOND", "SECOND", "TASK", "Part", "call_of", "playing"]

TASK: Final = "Carry out the three turns of task 7731."
FIRST: Final = "first-9152"
SECOND: Final = "second-4407"
DONE: Final = "All three turns of the task are done."
PRINT_FIRST: Final = "echo first-$((9000+152)) | tee first.txt"
PRINT_SECOND: Final = "cat first.txt > second.txt && echo second-$((4400+7)) >> second.txt && cat second.txt"
TITLE: Final = "A task of three turns"
OFFERED: Final = "Call: <tool_call>"
LONGEST: Final = 65_536

Part = Callable[[str], Sequence[str]]
"""Returns the three answers to a client's prompt."""


def call_of(name: str, **arguments: object) -> str:
    """Write a call as the chat template has it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def _tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of bytes and of what is frequent in our pages: agents' prompts have 50,000 bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pages = [str(page) for page in (Path(__file__).parents[2] / "docs").glob("*.md")]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = trainers.BpeTrainer
    tokenizer.train(pages, trainer(vocab_size=4000, special_tokens=list(SPECIAL), initial_alphabet=alphabet))
    fast: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=SPECIAL[1], clean_up_tokenization_spaces=False
    )
    fast.chat_template = HERMES
    return fast


class Player:
    """Draws the tokens of the answers.

    Args:
        tokenizer: of the model; part: what the model says.

    Attributes:
        played: the answers that were begun, in order.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, part: Part) -> None:
        self._tokenizer = tokenizer
        self._part = part
        self._sampler = BatchSampler(len(tokenizer))
        self._answers: dict[bytes, list[int]] = {}
        self.played: list[str] = []

    def sample(self, logits: torch.Tensor, places: Sequence[Place]) -> SampledTokens:
        """Draw the next token of each answer, and the end behind it."""
        for row, place in enumerate(places):
            answer = self._answer(place.sequence.token_ids()[: place.sequence.num_prompt_tokens])
            done = len(place.sequence.generated_ids) + len(place.drafts)
            logits[row, answer[min(done, len(answer) - 1)]] += 1e4
        return self._sampler.sample(logits, places)

    def resume(self, waiting: Sequence[WaitingRow]) -> SampledTokens:
        """Ask rows again that waited."""
        return self._sampler.resume(waiting)

    def _answer(self, prompt_ids: Any) -> list[int]:  # noqa: ANN401 - token ids
        key = bytes(torch.as_tensor(prompt_ids, dtype=torch.int32).numpy())
        if key not in self._answers:
            text = str(self._tokenizer.decode(prompt_ids))
            answers = self._part(text)
            turn = 2 if SECOND in text else 1 if FIRST in text else 0
            said = answers[turn] if TASK in text and (OFFERED in text or "<tool_call>" not in answers[0]) else TITLE
            self.played.append(said)
            self._answers[key] = [*self._tokenizer.encode(said), self._tokenizer.eos_token_id]
        return self._answers[key]


@contextmanager
def playing(part: Part) -> Iterator[tuple[str, Player]]:
    """Run a server whose model plays a part; yield its address and the player."""
    tokenizer: Any = _tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=LONGEST,
        eos_token_id=tokenizer.eos_token_id,
    )
    player = Player(tokenizer, part)
    engine = EngineConfig(num_blocks=LONGEST // 4, self_test=False, beyond_context="clip", leases=True)
    model = LlamaForCausalLM(config)
    model.train(mode=False)
    llm = LLM(model, engine, tokenizer=tokenizer, sampler=player)
    service = Service(LocalEngine(llm), ServerConfig("small"), OpenAccess(), tokenizer=tokenizer)
    with running(service) as url:
        yield url, player
