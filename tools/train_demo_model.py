"""Train the demonstration's model: recall of facts from a document, learnt in a minute or two on one GPU.

    python -m tools.train_demo_model OUT [--minutes 2] [--seed 2]

Half of the batches are random sequences, each twice in a row, with the loss on the second copy: these teach the two
layers to look up what followed an equal beginning; on facts alone a model of this size stays at chance for minutes.
The other half are documents with many questions behind them, with the loss on the answers. Documents are drawn up to a
quarter longer than the longest that is served, since recall falls beyond what was trained.

Writes ``model.safetensors`` in float16 and ``config.json``, and prints recall on documents never seen, of float32
copies of the rounded weights.
"""

import argparse
import time
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import torch

from pagedkv.contract.arrays import Int64Array
from pagedkv.engine.demo.serving import (
    ANSWER_LENGTH,
    BOS,
    EOS,
    FACT_LENGTH,
    FULL_STOP,
    LONGEST,
    QUESTION_LENGTH,
    VOCABULARY,
    VOCABULARY_SIZE,
    draw_document,
)
from pagedkv.probe import compat

__all__ = ["CONFIG", "NOT_JUDGED", "copies", "documents", "main", "recall", "train"]

CONFIG: Final = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,  # of 32: with 8 of 16 a model stays at chance for more than 2 minutes
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
"""Of the model; what is not said is Llama's default."""

MOST_FACTS: Final = 120
"""Of a document: a quarter more than the longest that is asked about."""
FIRST_SHARE: Final = 0.15
"""Of these facts, at the beginning; all of them from half of the time on."""
NUM_QUESTIONS: Final = 24
TOKENS_A_BATCH: Final = 32_768
SHARE_WITH_COPIES: Final = 0.8
"""Of the time in which every second batch is of copies."""
WARM_UP_STEPS: Final = 200
TELL_EVERY: Final = 0.05
NOT_JUDGED: Final = -100

Batch: TypeAlias = tuple[Int64Array, Int64Array]
"""Tokens, and those of them whose prediction is judged, else -100: int64 ``[sequences, tokens]`` each."""


def copies(generator: np.random.Generator, longest: int) -> Batch:
    """Draw random sequences, each twice in a row; the second copy is judged."""
    length = int(generator.integers(8, longest // 2))
    num = max(1, TOKENS_A_BATCH // (2 * length))
    once = generator.integers(FULL_STOP, len(VOCABULARY), (num, length))
    tokens = np.concatenate([np.full((num, 1), BOS), once, once], axis=1)
    judged = np.where(np.arange(2 * length + 1) > length + 1, tokens, NOT_JUDGED)
    return tokens, judged


def documents(generator: np.random.Generator, most_facts: int) -> Batch:
    """Draw documents with questions behind them; the answers are judged."""
    num_facts = int(generator.integers(4, most_facts + 1))
    num_questions = min(num_facts, NUM_QUESTIONS)
    begin = 1 + FACT_LENGTH * num_facts
    num = max(1, TOKENS_A_BATCH // (begin + num_questions * (QUESTION_LENGTH + ANSWER_LENGTH)))
    rows = []
    for _ in range(num):
        document = draw_document(generator, num_facts)
        asked = generator.choice(num_facts, num_questions, replace=False)
        parts = [np.concatenate([document.question(fact), document.answer(fact)]) for fact in asked]
        rows.append(np.concatenate([document.tokens(), *parts]))
    tokens = np.stack(rows).astype(np.int64)
    behind = np.arange(tokens.shape[1]) - begin
    is_answer = (behind >= 0) & (behind % (QUESTION_LENGTH + ANSWER_LENGTH) >= QUESTION_LENGTH)
    return tokens, np.where(is_answer, tokens, NOT_JUDGED)


def train(model: compat.Model, seed: int, seconds: float, *, peak: float = 2e-3) -> int:
    """Train for so many seconds; return the number of steps. The rate rises, stays, and falls to zero at the end."""
    device, generator = model.device, np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.01)
    begin, num_steps, told = time.monotonic(), 0, 0.0
    while (share := (time.monotonic() - begin) / seconds) < 1:
        # Short sequences first: they are cheap, and what they teach holds for long ones.
        most_facts = int(min(1.0, FIRST_SHARE + 1.7 * share) * MOST_FACTS)
        is_copy = num_steps % 2 == 0 and share < SHARE_WITH_COPIES
        draw = copies(generator, FACT_LENGTH * most_facts) if is_copy else documents(generator, most_facts)
        tokens, judged = (torch.from_numpy(each).to(device, non_blocking=True) for each in draw)
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1.0, (num_steps + 1) / WARM_UP_STEPS, max(0.01, (1 - share) / 0.4))
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=tokens, labels=judged).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        num_steps += 1
        if share - told > TELL_EVERY:
            told = share
            what = "copies" if is_copy else "facts"
            print(f"{share:4.0%} step {num_steps}: loss {loss.item():.4f} ({what})", flush=True)
    return num_steps


@torch.no_grad()
def recall(model: compat.Model, seed: int, num_facts: int, num_documents: int = 64) -> float:
    """Share of questions answered rightly, all three tokens, one question behind each document of so many facts."""
    generator = np.random.default_rng(seed)
    drawn = [draw_document(generator, num_facts) for _ in range(num_documents)]
    asked = generator.integers(0, num_facts, num_documents)
    pairs = list(zip(drawn, asked, strict=True))
    prompts = torch.from_numpy(np.stack([np.append(each.tokens(), each.question(fact)) for each, fact in pairs]))
    expected = torch.from_numpy(np.stack([each.answer(fact) for each, fact in pairs])).to(model.device)
    tokens = prompts.long().to(model.device)
    for _ in range(ANSWER_LENGTH):
        tokens = torch.cat([tokens, model(tokens).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return float((tokens[:, -ANSWER_LENGTH:] == expected).all(dim=1).float().mean())


def main() -> None:
    """Train, round to float16, judge, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=2)
    asked = parser.parse_args()
    torch.manual_seed(asked.seed)
    torch.set_float32_matmul_precision("high")
    model = compat.make_llama(CONFIG)
    torch.nn.Module.to(model, "cuda" if torch.cuda.is_available() else "cpu")  # in place; the model's own has no types
    print(f"{sum(each.numel() for each in model.parameters()):,} parameters")
    num_steps = train(model, asked.seed, 60 * asked.minutes)
    torch.set_float32_matmul_precision("highest")
    torch.nn.Module.float(torch.nn.Module.half(model))  # judged as it is stored and served
    for num_facts in (8, 32, 64, LONGEST, MOST_FACTS):
        print(f"{num_steps} steps; {num_facts} facts: recall {recall(model, 10_000, num_facts, 512):.4f}", flush=True)
    torch.nn.Module.half(model)
    model.save_pretrained(asked.out)


if __name__ == "__main__":
    main()
