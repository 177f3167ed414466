"""``pagedkv generate``: answers of a model to prompts, by the engine."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final

import typer

from pagedkv.cli import options as opt
from pagedkv.cli.engine_options import EngineOptions, PromptFile, PromptRequest, typed_prompts
from pagedkv.cli.interrupting import EXIT_WRONG_ANSWERS, leaving_at_once, noticing_interrupts
from pagedkv.cli.options import command, flag, option
from pagedkv.cli.output_files import STANDARD_OUTPUT, atomic_file, command_line, require_writable, write_json
from pagedkv.cli.progress import prepare, progress_bars, working
from pagedkv.cli.tables import print_numbers, print_table
from pagedkv.contract.answers import MissCause
from pagedkv.errors import ConfigurationError, InterruptedRunError, OutputError
from pagedkv.model_folder import DEMO, require_model
from pagedkv.models.memory import GIB

if TYPE_CHECKING:
    from pagedkv.cli.generating import Figures, Verification
    from pagedkv.engine import EngineConfig, RequestOutput


CHOOSING: Final = (
    "temperature",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "bad_words",
    "logit_bias",
    "min_tokens",
    "logits_processors",
    "num_beams",
)
"""Parameters that may choose less likely tokens."""

MOST_SHOWN: Final = 10
"""Most differences that are listed; --json has all."""


@command
def generate(  # noqa: PLR0913 - typer needs a parameter for each option
    *,
    model: Annotated[str, option("PATH|ID", "Folder of a model, its name on the hub of Hugging Face, or demo.")],
    prompt: Annotated[list[str] | None, option("TEXT", "A prompt; may be given again.")] = None,
    input_file: Annotated[Path | None, option("FILE", "Prompts as JSON lines; - reads them.", "--input")] = None,
    chat: Annotated[bool, flag("Treat --prompt as a user's message, by the model's chat template.")] = False,
    max_tokens: Annotated[int, option("N", "New tokens of an answer, at most.")] = 64,
    samples: Annotated[int, option("N", "Answers to each prompt.")] = 1,
    temperature: Annotated[float, option("T", "0: the most likely tokens.")] = 0.0,
    ignore_eos: Annotated[bool, flag("Do not end answers at the model's end token.")] = False,
    dtype: Annotated[str, option("TYPE", "float32, bfloat16, float16, auto.")] = "float32",
    device: Annotated[str, option("NAME", "cpu, cuda, cuda:N; auto: a GPU where there is one.")] = "auto",
    engine: EngineOptions,
    verify: Annotated[bool, flag("Compare each answer with the model's own, dense; exit 1 where one differs.")] = False,
    output: Annotated[
        Path | None, option("FILE", "Answers as JSON lines, as they end; - prints only them.", "--output", "-o")
    ] = None,
    json_file: opt.JsonFile = None,
) -> None:
    """Answer prompts with a model of Hugging Face on paged memory: any decoder, with the model's own tokens.

    Prompts that begin alike share what was computed. Ctrl-C ends with the results so far; a second one at once.
    docs/engine.md lists the models, and the fields of a line of --input. demo is the small model of the demonstration.

    For example:

    pagedkv generate --model demo --prompt "red kite: locker 7. blue lamp: shelf 12. Where? red kite:" --max-tokens 3

    pagedkv generate --model ./my-llama --prompt "The red kite is in" --max-tokens 16

    pagedkv generate --model ./my-llama --input prompts.jsonl --output answers.jsonl --memory 4

    pagedkv generate --model ./my-llama --input prompts.jsonl --verify --json result.json

    pagedkv generate --model ./my-llama --draft-model ./my-small-llama --prompt "The red kite is in"
    """
    _require_sources(prompt, input_file, chat=chat)
    _require_targets(output, json_file, input_file)
    if verify and temperature:
        raise ConfigurationError("--verify compares the most likely tokens: leave --temperature at 0")
    engine.require_valid()
    prompts = None if input_file is None else PromptFile(_readable(input_file))
    for each in (model, engine.draft_model):
        if each not in {DEMO, None}:
            require_model(str(each))
    with working("Loading torch"), leaving_at_once():
        from pagedkv.cli import generating  # noqa: PLC0415 - paths are checked before torch is imported
        from pagedkv.engine import SamplingParams  # noqa: PLC0415 - as above
        from pagedkv.engine.demo.trained import load_demo  # noqa: PLC0415 - as above
        from pagedkv.engine.llm import compile_loops  # noqa: PLC0415 - as above
        from pagedkv.engine.loading import load  # noqa: PLC0415 - as above
        from pagedkv.probe import compat  # noqa: PLC0415 - as above

    config = engine.config()
    params = SamplingParams(max_tokens=max_tokens, n=samples, temperature=temperature, ignore_eos=ignore_eos)
    prompt_requests = [*typed_prompts(prompt or (), params, is_chat=chat)]
    prompt_requests += [] if prompts is None else prompts.requests(params)
    if verify:
        _require_greedy(prompt_requests)
        _require_exact(config)
    compat.be_silent()
    prepare(lambda: compile_loops(config))
    with working(f"Loading {model}"), leaving_at_once():
        loaded, tokenizer = load_demo(device) if model == DEMO else load(model, dtype, device)
        draft_model = None if engine.draft_model is None else load(engine.draft_model, dtype, device)[0]
        llm = generating.build(loaded, config, tokenizer, draft_model)
    rows: list[tuple[int, RequestOutput]] = []
    is_quiet = STANDARD_OUTPUT in {output, json_file}
    with progress_bars() as progress, _answers(output) as write:

        def report(place: int, answer: "RequestOutput") -> None:
            rows.append((place, answer))
            write({"where": prompt_requests[place].where, **_as_dict(place, answer)})
            if not is_quiet:
                _show(prompt_requests[place], answer)

        with noticing_interrupts() as interruption:
            figures = generating.serve(
                llm, prompt_requests, progress, report, is_interrupted=lambda: interruption() is not None
            )
            llm.close()
    verification = None
    if verify:
        with progress_bars() as progress:
            verification = _verified(lambda: generating.verify(loaded, llm, rows, progress))
    if json_file is not None:
        write_json(json_file, _document(model, figures, verification, rows))
    if not is_quiet:
        _print_figures(model, figures, verification)
    _end(figures, verification, interruption())


def _end(figures: "Figures", verification: "Verification | None", interruption: KeyboardInterrupt | None) -> None:
    if figures.is_interrupted:
        raise InterruptedRunError(
            f"interrupted: {figures.num_finished:,} of {figures.num_prompts:,} prompts are answered in full, the "
            "others in part"
        ) from interruption
    if verification is not None and verification.differences:
        first = verification.differences[0]
        typer.echo(
            f"pagedkv: {len(verification.differences):,} of {verification.num_answers:,} answers differ from the "
            f"model's own; the first is answer {first.answer} to prompt {first.index}, at token {first.position}: "
            f"{first.token_id} instead of {first.dense_token_id}",
            err=True,
        )
        raise typer.Exit(EXIT_WRONG_ANSWERS)


def _require_exact(config: "EngineConfig") -> None:
    """Refuse tiers that load other keys and values than were computed."""
    lossy = sorted({tier.coding.name for tier in config.tiers if tier.coding.is_lossy})
    if lossy:
        raise ConfigurationError(
            f"--verify compares answers with the model's own, which --tier-codec {lossy[0]} changes: leave one out"
        )


def _verified(verify: "Callable[[], Verification]") -> "Verification":
    try:
        return verify()
    except KeyboardInterrupt as error:
        raise InterruptedRunError("interrupted while answers were compared; all of them were given") from error


# The request


def _require_sources(prompt: list[str] | None, input_file: Path | None, *, chat: bool) -> None:
    if not prompt and input_file is None:
        raise ConfigurationError("there is no prompt: give --prompt TEXT, or --input FILE")
    if chat and not prompt:
        raise ConfigurationError("--chat is for --prompt: lines of --input have messages of their own")


def _require_targets(output: Path | None, json_file: Path | None, input_file: Path | None) -> None:
    if output is not None and output == json_file:
        raise OutputError(f"--output and --json both go to {output}: name two files")
    for target in (output, json_file):
        if target is not None:
            require_writable(target, *([] if input_file is None else [str(input_file)]))


def _require_greedy(prompt_requests: list[PromptRequest]) -> None:
    for each in prompt_requests:
        plain = type(each.params)()
        differing = [name for name in CHOOSING if getattr(each.params, name) != getattr(plain, name)]
        if differing:
            raise ConfigurationError(
                f"{each.where}: --verify compares the most likely tokens: leave {', '.join(differing)} as it is"
            )


def _readable(path: Path) -> Path:
    return Path("/dev/stdin") if path == STANDARD_OUTPUT else path


# The results


@contextmanager
def _answers(target: Path | None) -> Iterator[Callable[[dict[str, object]], None]]:
    """Write rows to a file as they are finished; rows written before Ctrl-C are kept."""
    opened = nullcontext(None) if target is None else atomic_file(target)
    with opened as file:
        yield lambda row: _write(file, row)


def _write(file: BinaryIO | None, row: dict[str, object]) -> None:
    if file is not None:
        file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        file.flush()


def _as_dict(place: int, answer: "RequestOutput") -> dict[str, Any]:
    row = {"index": place, **asdict(answer, dict_factory=_plain)}
    row["receipt"]["hits_by_medium"] = answer.receipt.hits_by_medium
    return row


def _plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dictionary for JSON, with causes as words."""
    return {name: value.value if isinstance(value, MissCause) else value for name, value in items}


def _show(request: PromptRequest, answer: "RequestOutput") -> None:
    for each in answer.completions:
        which = f", answer {each.index + 1}" if len(answer.completions) > 1 else ""
        text = " ".join(map(str, each.token_ids)) if each.text is None else each.text
        typer.echo(f"[{request.where}{which}] {text}")


def _document(
    model: str,
    figures: "Figures",
    verification: "Verification | None",
    rows: "list[tuple[int, RequestOutput]]",
) -> dict[str, object]:
    return {
        "command": command_line(),
        "model": model,
        "figures": figures.as_dict(),
        "verification": None if verification is None else asdict(verification),
        "outputs": [_as_dict(place, answer) for place, answer in sorted(rows, key=lambda row: row[0])],
    }


def _loaded(figures: "Figures") -> Iterator[tuple[str, str]]:
    for medium, num_tokens in figures.num_loaded_tokens.items():
        yield f"hits loaded from tier {medium}", f"{num_tokens:,} tokens"


def _print_figures(model: str, figures: "Figures", verification: "Verification | None") -> None:
    peak = f"{figures.peak_used_blocks:,} of {figures.num_blocks:,} blocks in use"
    hits = f"{figures.hit_ratio:.2%} ({figures.num_cached_tokens:,} of {figures.num_prompt_tokens:,} prompt tokens)"
    rows = [
        ("prompts answered", f"{figures.num_finished:,} of {figures.num_prompts:,}"),
        ("tokens generated", f"{figures.num_generated_tokens:,} in {figures.seconds:,.2f} s"),
        ("tokens a second", f"{figures.tokens_per_s:,.1f}"),
        ("hit ratio by token", hits),
        *_loaded(figures),
        ("memory for keys and values", f"{figures.kv_nbytes / GIB:,.3f} GiB, at most {peak}"),
        ("preemptions", f"{figures.num_preemptions:,}, {figures.num_recomputed_tokens:,} tokens again"),
        ("steps", f"{figures.num_steps:,}"),
    ]
    if figures.acceptance is not None:
        accepted = f"{figures.num_accepted_tokens:,} of {figures.num_drafted_tokens:,} guessed tokens"
        rows.append(("guesses that were right", f"{figures.acceptance:.2%} ({accepted})"))
    if verification is not None:
        certain = f"{verification.num_certain_tokens:,} of {verification.num_tokens:,} tokens are certain"
        rows.append(("compared with dense", f"{verification.num_answers:,} answers, {certain}"))
        rows.append(("that differ", f"{len(verification.differences):,}"))
    print_table(f"Answers of {Path(model).name}", rows)
    if verification is not None and verification.differences:
        numbers = [tuple(f"{number:,}" for number in asdict(each).values()) for each in verification.differences]
        print_numbers("Differences", ("prompt", "answer", "position", "token", "dense"), numbers[:MOST_SHOWN])
