"""PeerWatch: notices within a step that another rank has ended or does not answer.

A rank that waits for its GPU raises no error: the GPU waits for the other ranks. So a thread of each rank watches the
others, and ends that wait. Each rank has a connection to rank 0::

    rank 1 ---+
    rank 2 ---+--- rank 0       a byte at least each second, both ways; a rank that leaves in order says so first
    rank 3 ---+

If a connection ends without that, or is silent for too long, a rank is lost. Rank 0 then names it to the others.
"""

import secrets
import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Final, final

__all__ = ["PeerWatch", "connect_to_first", "connect_to_others"]

INTERVAL_S: Final = 1.0
ALIVE: Final = b"."
LEAVES: Final = b"E"
LOST: Final = b"L"
"""The rest of the words is a text: which rank is lost, and how that was noticed."""
HELLO_S: Final = 5.0
"""What connects and is no rank may be silent for so long."""
NUM_KEY_BYTES: Final = 16
NUM_RANK_BYTES: Final = 4


@final
class PeerWatch:
    """Watches connections to other ranks, in a thread.

    Args:
        peers: the connections, by rank.
        patience_s: a rank that is silent for this time is lost.
        on_loss: called once in the thread, when :attr:`loss` is set.

    Attributes:
        loss: which rank is lost, and how that was noticed; None: none is.
    """

    def __init__(self, peers: dict[int, socket.socket], patience_s: float, on_loss: Callable[[], object]) -> None:
        self.loss: str | None = None
        self._peers = peers
        self._patience_s = patience_s
        self._on_loss = on_loss
        self._is_in_order = True
        self._left: list[int] = []
        self._waking, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._heard_at = dict.fromkeys(peers, monotonic())
        for rank, peer in peers.items():
            peer.setblocking(False)  # noqa: FBT003 - its only argument
            self._selector.register(peer, selectors.EVENT_READ, rank)
        self._thread = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._thread.start()

    @property
    def gone(self) -> str | None:
        """Why what this rank waits for does not come: a rank is lost, or has left in order; None: neither."""
        return self.loss or (f"rank {self._left[0]} has left" if self._left else None)

    def close(self, *, in_order: bool = True) -> None:
        """End the watch. May be called again.

        Args:
            in_order: whether this rank says to the others that it leaves; if not, it is lost to them.
        """
        self._is_in_order = in_order
        with suppress(OSError):  # the thread has ended, or is ending
            self._waking.send(LEAVES)
        self._thread.join()

    def _watch(self) -> None:
        try:
            while self.loss is None and not self._is_leaving():
                self._send_to_all(ALIVE)
                self._find_silent()
            if self.loss is not None:
                self._send_to_all(LOST + self.loss.encode())
            elif self._is_in_order:
                self._send_to_all(LEAVES)
        finally:
            self._selector.close()
            for each in (*self._peers.values(), self._waking, self._woken):
                each.close()
        if self.loss is not None:
            self._on_loss()

    def _is_leaving(self) -> bool:
        """Read what has come within the interval; return whether this rank is to leave."""
        for key, _ in self._selector.select(min(INTERVAL_S, self._patience_s / 4)):
            if key.fileobj is self._woken:
                return True
            self._read(key.data)
        return False

    def _read(self, rank: int) -> None:
        try:
            received = self._peers[rank].recv(4096)
        except OSError:
            received = b""
        word = received.lstrip(ALIVE)
        if not received:
            self.loss = f"rank {rank} has ended"
        elif word.startswith(LOST):
            self.loss = word[len(LOST) :].decode()
        elif word:
            self._left.append(rank)
            peer = self._peers.pop(rank)
            self._selector.unregister(peer)
            peer.close()
        self._heard_at[rank] = monotonic()

    def _find_silent(self) -> None:
        for rank in self._peers:
            silent_s = monotonic() - self._heard_at[rank]
            if self.loss is None and silent_s > self._patience_s:
                self.loss = f"rank {rank} has not answered for {silent_s:.0f} seconds"

    def _send_to_all(self, word: bytes) -> None:
        for peer in self._peers.values():
            try:
                peer.send(word)
            except OSError:
                continue  # its end is read next


def connect_to_others(size: int, share: Callable[[bytes], bytes], timeout_s: float) -> dict[int, socket.socket]:
    """On rank 0, accept a connection of every other rank; return them by rank.

    Args:
        size: number of ranks.
        share: sends bytes of rank 0 to all ranks.
        timeout_s: for all ranks to connect.

    Raises:
        OSError: a rank did not connect in time.
    """
    key = secrets.token_bytes(NUM_KEY_BYTES)
    peers: dict[int, socket.socket] = {}
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=is_dual) as listener:
        listener.settimeout(timeout_s)
        share(key + listener.getsockname()[1].to_bytes(NUM_RANK_BYTES))
        while len(peers) < size - 1:
            peer, _ = listener.accept()
            rank = _rank_behind(peer, key)
            if rank in range(1, size) and rank not in peers:
                peers[rank] = peer
            else:
                peer.close()
    return peers


def _rank_behind(peer: socket.socket, key: bytes) -> int:
    """Return the rank that has connected; 0: it is none."""
    peer.settimeout(HELLO_S)
    hello = b""
    with suppress(OSError):
        while len(hello) < NUM_KEY_BYTES + NUM_RANK_BYTES and (words := peer.recv(NUM_KEY_BYTES + NUM_RANK_BYTES)):
            hello += words
    is_rank = hello[:NUM_KEY_BYTES] == key and len(hello) == NUM_KEY_BYTES + NUM_RANK_BYTES
    return int.from_bytes(hello[NUM_KEY_BYTES:]) if is_rank else 0


def connect_to_first(
    rank: int, host: str, share: Callable[[bytes], bytes], timeout_s: float
) -> dict[int, socket.socket]:
    """On another rank, connect to rank 0 at a host; return the connection. Raises OSError: rank 0 does not answer."""
    shared = share(bytes(NUM_KEY_BYTES + NUM_RANK_BYTES))
    key, port = shared[:NUM_KEY_BYTES], int.from_bytes(shared[NUM_KEY_BYTES:])
    peer = socket.create_connection((host, port), timeout=timeout_s)
    peer.sendall(key + rank.to_bytes(NUM_RANK_BYTES))
    return {0: peer}
