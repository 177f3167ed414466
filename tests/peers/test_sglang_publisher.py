"""Our publisher of KV events, read by SGLang's own classes, as far as their types allow."""

from typing import Final

import msgspec
import pytest

from tests.peers.absent import stand_in

stand_in()

from sglang.srt.disaggregation.kv_events import AllBlocksCleared, KVEventBatch  # noqa: E402 - behind what is absent

from pagedkv import FullAttention  # noqa: E402
from pagedkv.wire import BatchEncoder, changes_of  # noqa: E402
from tests.space.spaces import cache, new_space, tokens  # noqa: E402

GROUPS: Final = (FullAttention(4),)


def test_heartbeats_and_clears_are_read() -> None:
    space, encoder = new_space(*GROUPS, events=True), BatchEncoder(GROUPS, "life", rank=3)
    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    assert decoder.decode(encoder.batch(1.5, ())) == KVEventBatch(ts=1.5, events=[], attn_dp_rank=3)
    cache(space, tokens(8))
    space.reset_prefix_cache()
    assert decoder.decode(encoder.batch(1.5, changes_of(space, space.drain_events()))).events == [AllBlocksCleared()]


def test_digests_are_no_numbers() -> None:
    """SGLang's hashes are numbers of 64 bits: its classes refuse bytes, vLLM's as well as ours."""
    space, encoder = new_space(*GROUPS, events=True), BatchEncoder(GROUPS, "life")
    cache(space, tokens(8))
    payload = encoder.batch(1.5, changes_of(space, space.drain_events()))
    with pytest.raises(msgspec.ValidationError, match=r"Expected `int`, got `bytes`.*block_hashes"):
        msgspec.msgpack.decode(payload, type=KVEventBatch)
