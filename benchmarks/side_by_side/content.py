"""Draws what is done with content, whoever's it is: held, kept, forgotten, brought, withdrawn; weights and the time."""

from benchmarks.side_by_side.player import Player, is_done
from pagedkv import InvalidatedMemory, Load, PrefixHit, Ticket, Withdrawal

__all__ = [
    "advance",
    "finish_load",
    "forget",
    "hold",
    "invalidate_memory",
    "lease",
    "load",
    "release",
    "reset_prefix_cache",
    "set_weights_epoch",
    "withdraw",
]


def advance(player: Player) -> None:
    """Let time pass: leases end, and ages grow."""
    player.now_s += player.random.choice((0, 1, 3, 30, 10_000))
    player.call("advance", player.now_s)


def lease(player: Player) -> None:
    """Keep what is cached of a prompt for some seconds."""
    if player.config.leases:
        tokens, keys = player.prompt()
        player.call("lease", tokens, player.now_s + player.random.randint(1, 9), keys=keys)


def forget(player: Player) -> None:
    """Forget a prompt, or its end."""
    tokens, keys = player.prompt()
    player.call("forget", tokens, keys=keys, start=player.random.randint(0, len(tokens)))


def hold(player: Player) -> None:
    """Keep blocks for a reader: some of a row's, or those of an earlier hit, which may be gone."""
    rows, hits = player.of("running"), [hit for _, hit in player.matches]
    if hits and player.chance(0.5):
        by_pool = player.random.choice(hits).blocks_by_pool()
        pool = player.random.choice(sorted(by_pool))
        blocks = by_pool[pool].tolist()
    elif rows:
        group = player.random.randrange(len(player.config.groups))
        pool = player.config.groups[group].pool
        blocks = [block for block in player.space.block_ids(player.random.choice(rows).row, group) if block]
    else:
        return
    ticket = player.call("hold", blocks[: player.random.randint(1, 4)], pool)
    if isinstance(ticket, Ticket):
        player.tickets.append(ticket)


def release(player: Player) -> None:
    """Give back what a ticket holds."""
    if player.tickets:
        player.call("release", player.tickets.pop(player.random.randrange(len(player.tickets))))


def load(player: Player) -> None:
    """Reserve blocks for a prefix that is brought, perhaps of older weights."""
    tokens, keys = prompt = player.prompt()
    player.prompts.append(prompt)
    options = player.tenant()
    epochs = None
    if player.config.counts_epochs and player.chance(0.3):
        epochs = (max(0, player.epoch - player.random.randint(0, 2)), player.epoch)
    answer = player.call("load", tokens, player.random.randint(1, len(tokens)), keys=keys, epochs=epochs, **options)
    if isinstance(answer, Load):
        player.loads.append(answer)


def finish_load(player: Player) -> None:
    """Bring all of a load, a part of it, or nothing."""
    if player.loads:
        ended = player.loads.pop(player.random.randrange(len(player.loads)))
        count = player.random.choice((None, player.random.randint(0, ended.num_tokens)))
        player.call("finish_load", ended, count)


def withdraw(player: Player) -> None:
    """Declare blocks bad: of a row, or of an earlier hit."""
    rows = player.of("running")
    group = player.random.randrange(len(player.config.groups))
    hits = [hit.block_ids[group].tolist() for _, hit in player.matches if isinstance(hit, PrefixHit)]
    among = [*hits, *(player.space.block_ids(each.row, group) for each in rows)]
    blocks = [block for block in player.random.choice(among) if block] if among else []
    if blocks:
        bad = player.random.sample(blocks, 1)
        answer = player.call("withdraw", bad, pool=player.config.groups[group].pool)
        if isinstance(answer, Withdrawal):
            player.lose(answer.lost_rows)


def reset_prefix_cache(player: Player) -> None:
    """Forget all that is cached."""
    player.call("reset_prefix_cache")


def invalidate_memory(player: Player) -> None:
    """Give the device's memory back; mostly after the last step is over."""
    if player.chance(0.8):
        while player.in_flight:
            player.call("acknowledge", player.in_flight.popleft().step_id)
    answer = player.call("invalidate_memory")
    if isinstance(answer, InvalidatedMemory):
        player.lose(answer.lost_rows)


def set_weights_epoch(player: Player) -> None:
    """Go on with new weights: text that was there before or not, or a number that mostly grows."""
    if not player.config.counts_epochs:
        player.call("set_weights_epoch", player.random.choice(("", "a", "b")))
        return
    epoch = max(0, player.epoch + player.random.choice((1, 1, 1, 2, 0, -1)))
    if is_done(player.call("set_weights_epoch", epoch)):
        player.epoch = epoch
