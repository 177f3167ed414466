"""NixlLink: moves a prompt from the memory of one process to that of another by NIXL, without a tier.

::

    engine A: hand_over(prompt, link)    frames of the cached blocks, in memory that the link has registered
                 |  metadata, address, length: plain values in the HandOff
    engine B: take_over(hand_off, link)  one READ into memory of B, a notification to A, which frees its copy

The frames are those of tiers and files of prefixes, with the identity of their content and a checksum, and are verified
before a block is filled from them. Memory is host memory, and UCX moves it: shared memory on one machine, else a
network. NIXL 1.5 needs no GPU for that.

Whoever has a hand-off can read the frames, and metadata of other ends are trusted: use links on trusted networks only.
"""

import base64
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, final
from uuid import uuid4

import numpy as np

from pagedkv.contract.arguments import as_count
from pagedkv.contract.extras import needing
from pagedkv.errors import ConfigurationError
from pagedkv.tiers.entry_blocks import Rows

__all__ = ["NixlLink"]

MOST_NBYTES: Final = 2**30
POLL_S: Final = 0.0002
MEMORY: Final = "DRAM"
UNDER_WAY: Final = "PROC"
DONE: Final = "DONE"
FIELDS: Final = frozenset({"metadata", "address", "nbytes", "ticket"})


@dataclass(frozen=True, slots=True, eq=False)
class _Offered:
    """Frames that wait to be taken."""

    memory: Rows
    registration: Any


@final
class NixlLink:
    """One end of hand-offs by NIXL; an engine may use it for any number of prompts. One thread uses it at a time.

    Args:
        name: of this end, unlike that of any other end; None: machine, process and a random number.
        backend: NIXL's plug-in that moves the bytes.
        most_nbytes: most bytes of prompts that wait to be taken. Beyond that the oldest are dropped, and cannot be
            taken any more.

    Raises:
        MissingExtraError: NIXL is not installed.
        ConfigurationError: NIXL cannot open the plug-in.
    """

    def __init__(self, name: str | None = None, *, backend: str = "UCX", most_nbytes: int = MOST_NBYTES) -> None:
        self.name = name or f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}"
        self._most_nbytes = as_count(most_nbytes, "most_nbytes", least=1)
        with needing("nixl", "a hand-off from memory to memory"):
            nixl: Any = import_module("nixl._api")
        try:
            self._agent: Any = nixl.nixl_agent(self.name, nixl.nixl_agent_config(backends=[backend]))
        except Exception as problem:
            raise ConfigurationError(f"NIXL cannot open its plug-in {backend!r}: {problem!r}") from problem
        known = sorted(self._agent.get_plugin_list())
        if backend not in known:  # NIXL only logs it
            raise ConfigurationError(f"NIXL has no plug-in {backend!r}: it has {', '.join(known)}")
        self._offered: dict[str, _Offered] = {}

    @property
    def num_waiting(self) -> int:
        """Prompts that were handed over and not taken yet."""
        self._release_taken()
        return len(self._offered)

    def offer(self, frames: Sequence[bytes]) -> dict[str, Any]:
        """Put frames where another end can read them; return where, as plain values. O(bytes).

        Raises ConfigurationError: they are larger than ``most_nbytes``.
        """
        self._release_taken()
        nbytes = sum(map(len, frames))
        if nbytes > self._most_nbytes:
            raise ConfigurationError(
                f"the prompt has {nbytes:,} bytes, and the link has {self._most_nbytes:,}: raise most_nbytes"
            )
        while self._offered and sum(each.memory.nbytes for each in self._offered.values()) + nbytes > self._most_nbytes:
            self._drop(next(iter(self._offered)))
        memory = np.frombuffer(bytearray().join(frames), np.uint8)
        registration = self._agent.register_memory([(_address(memory), nbytes, 0, "")], MEMORY)
        ticket = uuid4().hex
        self._offered[ticket] = _Offered(memory, registration)
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"metadata": metadata, "address": _address(memory), "nbytes": nbytes, "ticket": ticket}

    def fetch(self, place: Mapping[str, Any], timeout_s: float) -> memoryview:
        """Read frames that another end has offered, and tell it that they are taken.

        Raises:
            ConfigurationError: the place is none, the other end does not answer in time, or it has dropped the frames.
        """
        if not isinstance(place, Mapping) or set(place) != FIELDS:
            raise ConfigurationError(f"the place of a hand-off has {sorted(FIELDS)}, got {place!r:.200}")
        memory = np.empty(as_count(place["nbytes"], "nbytes of a hand-off", least=1, most=self._most_nbytes), np.uint8)
        agent, registration = self._agent, None
        try:
            registration = agent.register_memory([(_address(memory), memory.nbytes, 0, "")], MEMORY)
            other = agent.add_remote_agent(base64.b64decode(place["metadata"]))
            here = agent.get_xfer_descs([(_address(memory), memory.nbytes, 0)], MEMORY)
            there = agent.get_xfer_descs([(place["address"], memory.nbytes, 0)], MEMORY)
            transfer = agent.initialize_xfer("READ", here, there, other, place["ticket"].encode())
            try:
                self._await(transfer, timeout_s)
            finally:
                agent.release_xfer_handle(transfer)
        except ConfigurationError:
            raise
        except Exception as problem:
            raise ConfigurationError(f"the hand-off cannot be read from its engine's memory: {problem!r}") from problem
        finally:
            if registration is not None:
                agent.deregister_memory(registration)
        return memory.data

    def close(self) -> None:
        """Drop what was not taken. The link cannot be used any more."""
        for ticket in list(self._offered):
            self._drop(ticket)
        del self._agent

    def _await(self, transfer: object, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        state = self._agent.transfer(transfer)
        while state == UNDER_WAY and time.monotonic() < until:
            time.sleep(POLL_S)
            state = self._agent.check_xfer_state(transfer)
        if state != DONE:
            raise ConfigurationError(
                f"the hand-off was not read within {timeout_s:g} s: its transfer is in state {state}"
            )

    def _release_taken(self) -> None:
        """Free the frames that other ends have read."""
        for tickets in self._agent.get_new_notifs().values():
            for ticket in tickets:
                self._drop(ticket.decode())

    def _drop(self, ticket: str) -> None:
        offered = self._offered.pop(ticket, None)
        if offered is not None:
            self._agent.deregister_memory(offered.registration)


def _address(memory: Rows) -> int:
    address: int = memory.__array_interface__["data"][0]
    return address
