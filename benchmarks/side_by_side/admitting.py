"""Draws admissions: prompts, whole or in chunks, with some of all arguments that a prompt may have."""

from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks.side_by_side.player import NO_KEYS, Options, Player, Prompt, Sequence
from pagedkv import Allocation, PrefixHit, hash_request_tokens

__all__ = ["allocate", "ask_for_match"]

MOST_REPLAYED: Final = 12


def allocate(player: Player) -> None:
    """Admit a prompt; sometimes also call ``can_allocate``, and ``explain`` where reasons are recorded."""
    tokens, keys = prompt = player.prompt()
    player.prompts.append(prompt)
    options = _said_of(player, prompt) | player.lookahead() | player.tenant()
    if player.chance(0.1):
        options["num_sequences"] = player.random.randint(1, 3)
    if player.chance(0.3):
        chunk: Options = {"max_chunk": 4} if player.chance(0.3) else {}
        player.call("can_allocate", tokens, **options, **chunk)
    given, options = _perhaps_in_chunks(player, tokens, options)
    options |= _drafts_or_external(player, given) | _intent(player, prompt)
    answer = player.call("allocate", given, **options)
    if isinstance(answer, Allocation):
        player.sequences[answer.row] = Sequence(answer.row, keys, list(given), options.get("num_draft", 0))
        if player.config.explain:
            player.call("explanation", answer.row)


def ask_for_match(player: Player, prompt: Prompt) -> PrefixHit | None:
    """Match a prompt; the answer may be used much later."""
    bounds: Options = {}
    if player.chance(0.1):
        bounds["max_hit_tokens"] = player.random.randint(0, 12)
    if player.mix.replays and player.chance(0.9):
        bounds["max_replay_tokens"] = MOST_REPLAYED
    hit = player.call("match", prompt[0], keys=prompt[1], **bounds)
    if not isinstance(hit, PrefixHit):
        return None
    player.matches.append((prompt, hit))
    return hit


def _said_of(player: Player, prompt: Prompt) -> Options:
    """Return the arguments of every question about a prompt: its keys; perhaps digests, or an answer, new or old."""
    options: Options = {} if prompt[1] is NO_KEYS else {"keys": prompt[1]}
    if player.mix.takes_digests and player.mix.caching and player.chance(0.05):
        return options | {"digests": _digests(player, prompt)}
    hit = ask_for_match(player, prompt) if player.chance(0.9 if player.mix.replays else 0.4) else None
    earlier = [answer for asked, answer in player.matches if asked == prompt]
    if hit is None and earlier and player.chance(0.5):
        hit = earlier[-1]
    return options if hit is None else options | {"match": hit}


def _digests(player: Player, prompt: Prompt) -> npt.NDArray[np.uint8]:
    """Bring digests from elsewhere: the right ones, or nonsense."""
    block_size = next(group.block_size for group in player.mix.groups if group.prefix_caching)
    epoch = player.space.weights_epoch
    digests = hash_request_tokens(prompt[0], block_size, prompt[1], epoch if isinstance(epoch, str) else "")
    if player.chance(0.3):
        digests = [bytes(32)] * len(digests)
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32)


def _perhaps_in_chunks(player: Player, tokens: list[int], options: Options) -> tuple[list[int], Options]:
    """Give a prompt whole, or its first chunk with word of the whole."""
    if len(tokens) < 4 or "digests" in options or not player.chance(0.2):
        return tokens, options
    hit = options.get("match")
    end = hit.checkpoint if hit is not None and hit.checkpoint else player.random.randint(1, len(tokens))
    return tokens[:end], options if hit is not None else options | {"prompt": tokens}


def _drafts_or_external(player: Player, tokens: list[int]) -> Options:
    if player.mix.takes_drafts and len(tokens) > 4 and player.chance(0.05):
        return {"num_draft": player.random.randint(1, 3)}
    return {"num_external_tokens": player.random.randint(0, len(tokens) - 1)} if player.chance(0.05) else {}


def _intent(player: Player, prompt: Prompt) -> Options:
    """Draw what is to be published, and the receipt that the request continues."""
    options: Options = {"publish": player.random.choice((False, "prompt"))} if player.chance(0.1) else {}
    if player.ended and player.chance(0.3):
        same = [receipt for asked, receipt in player.ended if asked == prompt]
        options["continues"] = same[-1] if same else player.random.choice(player.ended)[1]
    return options
