"""A rank that ends without a word, or is silent, is noticed while another waits; one that leaves in order is not."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from pagedkv.engine.ranks import PeerWatch, connect_to_first, connect_to_others

LONG_S: Final = 60.0
SHORT_S: Final = 0.05


class Watched:
    """A watch of one peer, whose end of the connection the test has."""

    def __init__(self, patience_s: float) -> None:
        ours, self.peer = socket.socketpair()
        self.peer.settimeout(LONG_S)
        self.lost = threading.Event()
        self.watch = PeerWatch({3: ours}, patience_s, self.lost.set)


@pytest.fixture
def watched() -> Iterator[Callable[[float], Watched]]:
    """Watch peers, until the end of the test."""
    made: list[Watched] = []

    def make(patience_s: float = LONG_S) -> Watched:
        made.append(Watched(patience_s))
        return made[-1]

    yield make
    for each in made:
        each.watch.close()
        each.peer.close()


def test_a_peer_that_ends_is_lost_at_once(watched: Callable[..., Watched]) -> None:
    each = watched()
    each.peer.close()
    assert each.lost.wait(LONG_S)
    assert each.watch.loss == "rank 3 has ended"


def test_a_silent_peer_is_lost_after_its_time(watched: Callable[..., Watched]) -> None:
    each = watched(SHORT_S)
    assert each.lost.wait(LONG_S)
    assert each.watch.loss == "rank 3 has not answered for 0 seconds"
    received = b""
    while words := each.peer.recv(100):
        received += words
    assert received.lstrip(b".") == b"Lrank 3 has not answered for 0 seconds", "the others lose it as well"


def test_what_rank_0_has_lost_is_named_to_the_others(watched: Callable[..., Watched]) -> None:
    each = watched()
    each.peer.send(b"..Lrank 5 has ended")
    assert each.lost.wait(LONG_S)
    assert each.watch.loss == "rank 5 has ended"


def test_two_that_watch_one_another_lose_neither() -> None:
    ours, theirs = socket.socketpair()
    lost = threading.Event()
    watches = [PeerWatch({1: ours}, 2 * SHORT_S, lost.set), PeerWatch({0: theirs}, 2 * SHORT_S, lost.set)]
    assert not lost.wait(20 * SHORT_S), "ten times their patience"
    watches[1].close()
    watches[0].close()
    watches[0].close()
    assert [watch.loss for watch in watches] == [None, None]
    assert not lost.is_set()


def test_a_peer_that_leaves_in_order_is_not_lost(watched: Callable[..., Watched]) -> None:
    each = watched(4 * SHORT_S)
    each.peer.send(b".E")
    while each.peer.recv(100):
        pass  # until the watch has closed its end
    each.watch.close()
    assert (each.watch.loss, each.watch.gone) == (None, "rank 3 has left")


def test_a_watch_that_ends_out_of_order_is_lost_by_the_others(watched: Callable[..., Watched]) -> None:
    each = watched()
    each.watch.close(in_order=False)
    received = b""
    while words := each.peer.recv(100):
        received += words
    assert set(received) <= set(b".")


def test_it_may_be_closed_while_it_acts_on_a_loss() -> None:
    ours, theirs = socket.socketpair()
    acts, goes_on = threading.Event(), threading.Event()

    def act() -> None:
        acts.set()
        assert goes_on.wait(LONG_S)

    watch = PeerWatch({1: ours}, LONG_S, act)
    theirs.close()
    assert acts.wait(LONG_S)
    closing = threading.Thread(target=watch.close)
    closing.start()
    goes_on.set()
    closing.join(LONG_S)
    assert not closing.is_alive()
    watch.close()


def test_others_than_the_ranks_are_sent_away() -> None:
    """A connection without the key that rank 0 has sent to the ranks is closed; the ranks connect behind it."""
    shared = threading.Event()
    words: list[bytes] = []
    answered: list[bytes] = []

    def share(own: bytes) -> bytes:
        words.append(own)
        shared.set()
        return own

    def connect() -> None:
        assert shared.wait(LONG_S)
        port = int.from_bytes(words[0][16:])
        for hello in (bytes(20), words[0][:16] + bytes(4), words[0][:16] + (7).to_bytes(4)):
            with socket.create_connection(("127.0.0.1", port), timeout=LONG_S) as stranger:
                stranger.sendall(hello)
                answered.append(stranger.recv(1))
        with socket.create_connection(("127.0.0.1", port), timeout=LONG_S) as gone:
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # it resets the connection
        for rank in (2, 1):
            ((_, peer),) = connect_to_first(rank, "127.0.0.1", lambda _: words[0], LONG_S).items()
            peer.sendall(bytes([rank]))
            peer.close()

    connecting = threading.Thread(target=connect)
    connecting.start()
    peers = connect_to_others(3, share, LONG_S)
    connecting.join()
    assert answered == [b""] * 3
    assert {rank: peer.recv(1) for rank, peer in peers.items()} == {1: b"\1", 2: b"\2"}
    for peer in peers.values():
        peer.close()
