"""Draws what happens to rows: they grow, are rolled back, forked, swapped and given up."""

import numpy as np

from benchmarks.side_by_side.player import Options, Player, Sequence, is_done

__all__ = [
    "append",
    "append_chunk",
    "append_unknown",
    "decode",
    "fill",
    "fork",
    "free",
    "swap_in",
    "swap_out",
    "truncate",
]

# Growth


def append(player: Player) -> None:
    """Append ragged numbers of tokens to some rows, the last ones perhaps drafts."""
    batch, options = player.some(player.known()), player.lookahead()
    room = [max(0, player.room(each) - options.get("num_lookahead", 0)) for each in batch]
    _append(player, batch, [player.tokens(3)[:left] for left in room], options)


def decode(player: Player) -> None:
    """Append one token to every row that can take one."""
    batch = [each for each in player.known() if player.room(each)]
    _append(player, batch, [player.tokens(1, 1) for _ in batch], {})


def append_chunk(player: Player) -> None:
    """Append the next chunk of a prompt to one row: of a prompt seen before, or a new one."""
    for each in player.some(player.known(), 1):
        follows = [tokens for tokens, _ in player.prompts if tokens[: len(each.known)] == each.known]
        rest = player.random.choice(follows)[len(each.known) :] if follows else []
        _append(player, [each], [[*rest, *player.tokens(12)][: min(16, player.room(each))]], {})


def _append(player: Player, batch: list[Sequence], new: list[list[int]], options: Options) -> None:
    if not batch:
        return
    rows, counts = [each.row for each in batch], [len(tokens) for tokens in new]
    drafts = _drafts(player, counts) if player.mix.takes_drafts and player.chance(0.3) else [0] * len(batch)
    if any(drafts):
        options = options | {"num_draft": drafts[0] if len(set(drafts)) == 1 else drafts}
    if player.chance(0.2):
        player.call("can_append", rows, counts, **options)
    verb = player.random.choice(("append", "append_with_copies"))
    flat = [token for tokens in new for token in tokens]
    if not is_done(player.call(verb, rows, flat, counts, kind="append drafts" if any(drafts) else "", **options)):
        return
    for each, tokens, num_draft in zip(batch, new, drafts, strict=True):
        each.known += tokens
        each.num_draft = num_draft if tokens else each.num_draft


def _drafts(player: Player, counts: list[int]) -> list[int]:
    most = player.mix.num_draft_states or max(counts)
    return [min(player.random.randint(0, 3), count, most) for count in counts]


def append_unknown(player: Player) -> None:
    """Let some rows grow by tokens that are not known yet; drafts before them count as unknown from then on."""
    most = 2 if player.mix.takes_drafts else 1
    batch = [each for each in player.some(player.of("running"), 4) if player.room(each)]
    if not batch:
        return
    rows = [each.row for each in batch]
    counts = [min(player.random.randint(1, most), player.room(each)) for each in batch]
    if player.chance(0.2):
        player.call("can_append", rows, counts, unknown=True)
    if is_done(player.call("append", rows, None, counts, kind="append unknown")):
        for each in batch:
            each.known = each.known[: len(each.known) - each.num_draft]
            each.num_draft = 0


def fill(player: Player) -> None:
    """Fill in what steps have sampled, of some rows: mostly one token each."""
    batch = player.some(player.unknown(), 4)
    if not batch:
        return
    most = 3 if player.chance(0.2) else 1
    new = [player.tokens(most, 1) for _ in batch]
    flat = [token for tokens in new for token in tokens]
    if is_done(player.call("fill", [each.row for each in batch], flat, [len(tokens) for tokens in new])):
        for each, tokens in zip(batch, new, strict=True):
            each.known += tokens


def truncate(player: Player) -> None:
    """Roll some rows back by up to a few tokens; by none, drafts are accepted and reserved slots given back."""
    batch = player.some(player.of("running"), 2)
    if not batch:
        return
    lengths = [player.length(each) - player.random.choice((0, 0, 1, 2, 3, 7)) for each in batch]
    if is_done(player.call("truncate", [each.row for each in batch], lengths)):
        for each, length in zip(batch, lengths, strict=True):
            each.known = each.known[:length]
            each.num_draft = 0


# Sharing


def fork(player: Player) -> None:
    """Fork a row into a few, at its end or before."""
    for parent in player.some(player.of("running"), 1):
        at = player.random.randint(1, max(1, len(parent.known))) if player.chance(0.5) else None
        options = {} if at is None else {"at": at}
        kind = "fork" if at is None else "fork at"
        children = player.call("fork", parent.row, player.random.choice((1, 1, 2, 3)), kind=kind, **options)
        if isinstance(children, np.ndarray):
            for row in children.tolist():
                player.sequences[row] = Sequence(row, parent.keys, parent.known[:at], 0 if at else parent.num_draft)


def free(player: Player) -> None:
    """Give some rows up, wherever they are, with a word on what becomes of what they leave."""
    batch = player.some(list(player.sequences.values()))
    if not batch:
        return
    options = _wish(player, batch)
    if player.chance(0.3):
        options["num_generated"] = [player.random.choice((0, 5, 500)) for _ in batch]
    receipts = player.call("free", [each.row for each in batch], **options)
    if not is_done(receipts):
        return
    for each in batch:
        del player.sequences[each.row]
        player.prompts.append((each.known, each.keys))
    player.ended.extend(zip([(each.known, each.keys) for each in batch], receipts, strict=False))


def _wish(player: Player, batch: list[Sequence]) -> Options:
    others = [row for row in player.sequences if player.sequences[row] not in batch]
    wishes: list[Options] = [{}, {}, {}, {"priority": -1}]
    if others:
        wishes.append({"superseded_by": player.random.choice(others)})
    if player.config.leases:
        wishes += [{"priority": 1}, {"keep_until_s": player.now_s + 3}]
    return player.random.choice(wishes)


# Swapping


def swap_out(player: Player) -> None:
    """Move some rows to the host pools, if there are any."""
    batch = player.some(player.known())
    if not batch or not (player.mix.num_host_blocks or player.chance(0.1)):
        return
    rows = [each.row for each in batch]
    if player.chance(0.3):
        player.call("can_swap_out", rows)
    if is_done(player.call("swap_out", rows)):
        for each in batch:
            each.status = "swapped"


def swap_in(player: Player) -> None:
    """Move some rows back."""
    batch = player.some(player.of("swapped"))
    if not batch:
        return
    rows = [each.row for each in batch]
    if player.chance(0.3):
        counts = [min(player.random.randint(0, 3), player.room(each)) for each in batch]
        player.call("can_swap_in", rows, counts, **player.lookahead())
    if is_done(player.call("swap_in", rows)):
        for each in batch:
            each.status = "running"
