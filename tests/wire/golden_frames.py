"""What real publishers put on the wire, as it came out of a SUB and a DEALER socket.

Received from `ZmqEventPublisher`, driven with batches of their own classes that were made up for this: of vLLM 0.33.0
(`vllm/distributed/kv_events.py`, rank 0) and of SGLang 0.5.23 (`sglang/srt/disaggregation/kv_events.py`, rank 1), both
with the topic `kv`. The DEALER asked from message 1 on. Each test says what the batches were.
"""

from typing import Final

__all__ = ["NUMBERS", "SGLANG", "TOPIC", "VLLM", "answer"]

TOPIC: Final = b"kv"
NUMBERS: Final = (bytes(8), b"\x00\x00\x00\x00\x00\x00\x00\x01")
VLLM: Final = (
    (
        b"\x93\xcb?\xf8\x00\x00\x00\x00\x00\x00\x91\xde\x00\x0b\xa4type\xabBlockStored\xacblock_hashes\x92\xc4\x04\x00\x01"
        b"\x02\x03\xc4\x04\x04\x05\x06\x07\xb1parent_block_hash\xc0\xa9token_ids\x94\x01\xcd\x01\x00\x03\x04\xaablock_size"
        b"\x02\xa7lora_id\x07\xa6medium\xa3GPU\xa9lora_name\xa1a\xaaextra_keys\x92\x91\xa1a\x91\xa1a\xa9group_idx\x00"
        b"\xb2kv_cache_spec_kind\xaefull_attention\x00"
    ),
    (
        b"\x93\xcb@\x04\x00\x00\x00\x00\x00\x00\x93\xde\x00\n\xa4type\xabBlockStored\xacblock_hashes\x91\xc4\x04\x00\x01"
        b"\x02\x03\xb1parent_block_hash\xc0\xa9token_ids\x90\xaablock_size\x00\xa7lora_id\xc0\xa6medium\xa3CPU\xa9lora_name"
        b"\xc0\xa9group_idx\x01\xa8locality\xa5LOCAL\x84\xa4type\xacBlockRemoved\xacblock_hashes\x91\xc4\x04\x00\x01\x02\x03"
        b"\xa6medium\xa3GPU\xa9group_idx\x00\x81\xa4type\xb0AllBlocksCleared\x00"
    ),
)
SGLANG: Final = (
    (
        b"\x93\xcb?\xf8\x00\x00\x00\x00\x00\x00\x92\x81\xa4type\xb0AllBlocksCleared\x8a\xa4type\xabBlockStored"
        b"\xacblock_hashes\x92\x07\xf6\xb1parent_block_hash\xc0\xa9token_ids\x94\x01\xcd\x01\x00\x03\x04\xaablock_size\x02"
        b"\xa7lora_id\xc0\xa6medium\xa3GPU\xaacache_salt\xa1s\xaasession_id\xa1t\xa9lora_name\xa1a\x01"
    ),
    (
        b"\x93\xcb@\x04\x00\x00\x00\x00\x00\x00\x92\x87\xa4type\xabBlockStored\xacblock_hashes\x91\x07\xb1parent_block_hash"
        b"\xc0\xa9token_ids\x92\x01\xcd\x01\x00\xaablock_size\x02\xa7lora_id\xc0\xa6medium\xaaCPU_PINNED\x83\xa4type"
        b"\xacBlockRemoved\xacblock_hashes\x91\x07\xa6medium\xa3GPU\x01"
    ),
)


def answer(payloads: tuple[bytes, bytes]) -> list[list[bytes]]:
    """Give the frames that a DEALER received, which asked from message 1 on; both publishers send the same ones."""
    return [[b"", TOPIC, NUMBERS[1], payloads[1]], [b"", b"", b"\xff" * 8, b""]]
