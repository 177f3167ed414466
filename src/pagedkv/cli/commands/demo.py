"""``pagedkv demo``: a small model answers questions with too little KV memory, and every answer is checked."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from pagedkv.cli import options as opt
from pagedkv.cli.interrupting import EXIT_WRONG_ANSWERS, leaving_at_once
from pagedkv.cli.options import command, option
from pagedkv.cli.output_files import STANDARD_OUTPUT, command_line, require_writable, write_json
from pagedkv.cli.progress import live_view, prepare, working
from pagedkv.cli.tables import print_table, share
from pagedkv.contract.extras import needing

if TYPE_CHECKING:
    from pagedkv.engine.config import EngineConfig
    from pagedkv.engine.demo.serving import Judged, Served


@command
def demo(
    *,
    questions: Annotated[int, option("N", "Questions to answer.")] = 400,
    documents: Annotated[int, option("N", "Documents that the questions are about.")] = 24,
    num_blocks: Annotated[
        int | None, option("N", "Blocks of 16 tokens, one of them the null block. Default: 200.")
    ] = None,
    seed: opt.Seed = 0,
    json_file: opt.JsonFile = None,
) -> None:
    """Answer questions about documents with a small model and too little KV memory, and judge every answer.

    The model is part of the package. The documents' facts are random, so right answers can come only from the KV cache.
    Every answer is compared with dense generation as well. The exit code is 1 if fewer than 98% are right, or if one
    differs from dense generation's.

    For example:

    pagedkv demo

    pagedkv demo --questions 1000 --documents 60 --num-blocks 300
    """
    if json_file is not None:
        require_writable(json_file)
    with working("Loading torch and the model"), leaving_at_once(), needing("hf", "pagedkv demo"):
        import torch  # noqa: PLC0415 - takes seconds to import, and is optional

        from pagedkv.engine import LLM  # noqa: PLC0415 - needs torch
        from pagedkv.engine.demo.serving import (  # noqa: PLC0415 - as above
            DEMO_CONFIG,
            compile_loops,
            draw_questions,
            judge,
            serve,
        )
        from pagedkv.engine.demo.trained import load_trained  # noqa: PLC0415 - as above

        torch.set_num_threads(1)  # the model is too small to gain from several threads
        drawn = draw_questions(questions, documents, seed)
        model = load_trained()
    config = DEMO_CONFIG if num_blocks is None else replace(DEMO_CONFIG, num_blocks=num_blocks)
    prepare(lambda: compile_loops(model))
    with working("Comparing the model with itself, over blocks and dense"):
        llm = LLM(model, config)
    with live_view(len(drawn)) as watch:
        served = serve(llm, drawn, watch)
    with working("Answering again with dense generation, for comparison"):
        judged = judge(model, drawn, served)
    if json_file is not None:
        write_json(json_file, {"command": command_line(), **served.as_dict(), **judged.as_dict()})
    if json_file != STANDARD_OUTPUT:
        _print(served, judged, config)
    for failing in judged.failings:
        typer.echo(f"pagedkv: {failing}", err=True)
    if judged.failings:
        raise typer.Exit(EXIT_WRONG_ANSWERS)


def _print(served: "Served", judged: "Judged", config: "EngineConfig") -> None:
    measured = served.measured
    assert isinstance(config.num_blocks, int)
    num_usable = config.num_blocks - 1
    print_table(
        "Questions answered from paged memory",
        (
            ("right answers", share(judged.accuracy, judged.num_right, judged.num_answers)),
            ("the same as dense generation", f"{judged.num_same:,} of {judged.num_answers:,}"),
            ("memory", f"{num_usable * config.block_size:,} tokens in {num_usable:,} blocks"),
            ("prompt tokens", f"{served.num_prompt_tokens:,}"),
            ("hit ratio by token", share(served.hit_ratio, served.num_hit_tokens, served.num_prompt_tokens)),
            ("prompts computed in several steps", f"{measured.num_chunked:,}"),
            ("answers that began as a fork", f"{measured.num_forked:,}"),
            ("preempted: swapped, recomputed", f"{measured.num_swapped:,}, {measured.num_recomputed:,}"),
            ("cached blocks evicted", f"{measured.num_evictions:,}"),
            ("slots without a token, at most", f"{measured.most_waste:.2%} of the blocks in sequences' tables"),
            ("the same, shared blocks counted once", f"{measured.most_waste_of_blocks:.2%} of the blocks in use"),
            ("contiguous reservation would take", f"{measured.reserved_ratio:.1f} times the memory, in the mean"),
            ("tokens a second, one thread", f"{served.tokens_per_second:,.0f}, in {served.seconds:.1f} s"),
            ("padded generate, one thread", f"{judged.tokens_per_second:,.0f}, in {judged.seconds:.1f} s"),
        ),
    )
