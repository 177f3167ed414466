"""A server in a thread, over a model whose answers a test writes beforehand."""

import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast

import torch
from fastapi import FastAPI
from starlette.types import ASGIApp
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pagedkv.connections import uvicorn_config
from pagedkv.engine import LLM, EngineConfig
from pagedkv.engine.sampling import BatchSampler, Place, SampledTokens, WaitingRow
from pagedkv.listening import bound
from pagedkv.server import Access, LocalEngine, OpenAccess, ServerConfig, Service, create_app
from pagedkv.server.running import DrainingServer
from pagedkv.tiers import Tier

PATIENCE_S: Final = 120.0
HOST: Final = "127.0.0.1"
END: Final = "<|im_end|>"
SPECIAL: Final = ("<|im_start|>", END, "<think>", "</think>", "<tool_call>", "</tool_call>")
NUM_BYTES: Final = 256
VOCABULARY_SIZE: Final = 320

HERMES: Final = """\
{#- thoughts stand between <think> and </think>, and are not written again -#}
{%- if tools %}<|im_start|>system
Tools: {{ tools | tojson }} Call: <tool_call>{"name": ..., "arguments": ...}</tool_call>{{ '<|im_end|>\n' }}{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ (message.content or '').split('</think>')[-1].strip() }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer whose tokens are bytes, and the markers of a chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert len(letters) == NUM_BYTES
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=text.startswith("<|"), normalized=False) for text in SPECIAL]
    )
    fast: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False
    )
    fast.chat_template = HERMES
    return fast


TOKENIZER: Final = byte_tokenizer()
END_ID: Final[int] = NUM_BYTES + SPECIAL.index(END)


def tokens_of(answer: str, *, ends: bool = True) -> list[int]:
    """Return the tokens of an answer."""
    token_ids = TOKENIZER.encode(answer, add_special_tokens=False)
    return [*token_ids, END_ID] if ends else token_ids


class Script:
    """Draws the tokens that a test wrote for prompts that hold a text; others as their parameters say.

    Attributes:
        answers: tokens of the answer, by a text in the prompt.
    """

    def __init__(self) -> None:
        self.answers: dict[str, Sequence[int]] = {}
        self._sampler = BatchSampler(VOCABULARY_SIZE)

    def write(self, cue: str, answer: str, *, ends: bool = True) -> None:
        """Let prompts that hold a text be answered so."""
        self.answers[cue] = tokens_of(answer, ends=ends)

    def answer_of(self, place: Place, cue: str) -> Sequence[int]:  # noqa: ARG002 - of scripts that look at the sequence
        """Return the tokens of the answer to a prompt that holds a cue."""
        return self.answers[cue]

    def sample(self, logits: torch.Tensor, places: Sequence[Place]) -> SampledTokens:
        """Draw, the written token where there is one."""
        for row, place in enumerate(places):
            token = self._written(place)
            if token is not None:
                logits[row] -= 1000
                logits[row, token] += 2000
        return self._sampler.sample(logits, places)

    def resume(self, waiting: Sequence[WaitingRow]) -> SampledTokens:
        """Ask rows again that waited."""
        return self._sampler.resume(waiting)

    def _written(self, place: Place) -> int | None:
        sequence = place.sequence
        prompt = TOKENIZER.decode(sequence.token_ids()[: sequence.num_prompt_tokens])
        for cue in self.answers:
            if cue in prompt:
                answer = self.answer_of(place, cue)
                num_generated = len(sequence.generated_ids) + len(place.drafts)
                return answer[num_generated] if num_generated < len(answer) else None
        return None


def small_model(longest: int = 2048) -> LlamaForCausalLM:
    """Make the random model that services have, the same each time."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE, max_position_embeddings=max(4096, longest), eos_token_id=END_ID, **sizes
    )
    model = LlamaForCausalLM(config)
    model.train(mode=False)
    model.generation_config.eos_token_id = END_ID
    return model


def make_service(  # noqa: PLR0913 - what tests set, by keywords
    script: Script,
    access: Access | None = None,
    *,
    longest: int = 2048,
    name: str = "small",
    tiers: tuple[Tier, ...] = (),
    events: bool = False,
    adapters: Mapping[str, str] | None = None,
    **settings: object,
) -> Service:
    """Make a service over a small random model whose answers are written."""
    model = small_model(longest)
    tenants = getattr(access, "limits", None)
    engine = EngineConfig(
        num_blocks=600,
        self_test=False,
        predicted_tokens=4,
        beyond_context="clip",
        leases=True,
        tenants=tenants,
        max_tokens=longest,
        tiers=tiers,
        events=events,
        adapters=adapters,
    )
    tokenizer: Any = TOKENIZER  # whose types are wider than those of our protocol
    llm = LLM(model, engine, tokenizer=tokenizer, sampler=script)
    settled = ServerConfig(name, **cast("dict[str, Any]", settings))
    return Service(LocalEngine(llm), settled, access or OpenAccess(), tokenizer=TOKENIZER)


def local_engine(service: Service) -> LocalEngine:
    """Return the engine of a service in this process."""
    assert isinstance(service.engine, LocalEngine)
    return service.engine


@contextmanager
def running(
    service: Service,
    app: ASGIApp | None = None,
    *,
    adds: Callable[[FastAPI, Service], None] | None = None,
    send_nbytes: int | None = None,
) -> Iterator[str]:
    """Run a server on a free port; yield its address. The arguments are those of :func:`running_server`."""
    with running_server(service, app, adds=adds, send_nbytes=send_nbytes) as (url, _):
        yield url


@contextmanager
def running_server(
    service: Service,
    app: ASGIApp | None = None,
    *,
    adds: Callable[[FastAPI, Service], None] | None = None,
    send_nbytes: int | None = None,
    patience_s: float = PATIENCE_S,
    **encryption: object,
) -> Iterator[tuple[str, DrainingServer]]:
    """Run a server on a free port; yield its address, and the server.

    Args:
        service: what serves.
        app: another application than its own.
        adds: adds more to its own application.
        send_nbytes: bytes that the kernel holds of what a client has not read; None: what it likes.
        patience_s: seconds in which it is to end.
        encryption: uvicorn's options of TLS.
    """
    own = create_app(service)
    if adds is not None:
        adds(own, service)
    sockets = bound(HOST, 0)
    if send_nbytes is not None:
        sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_nbytes)
    started = threading.Event()
    server = DrainingServer(
        uvicorn_config(own if app is None else app, service.config, service.note_slow, host=HOST, port=0, **encryption),
        service,
        started.set,
    )
    thread = threading.Thread(target=server.run, args=(sockets,), daemon=True)
    thread.start()
    try:
        assert started.wait(PATIENCE_S), "the server did not begin"
        yield f"http://{HOST}:{sockets[0].getsockname()[1]}", server
    finally:
        server.should_exit = True
        thread.join(patience_s)
        assert not thread.is_alive(), "the server did not end"


def tool(name: str, **properties: Mapping[str, Any]) -> dict[str, Any]:
    """Offer a function, as OpenAI's clients do."""
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}


def call_text(name: str, arguments: object) -> str:
    """Write a call in Hermes' format."""
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'
