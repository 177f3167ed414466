"""AnswerStream: one request under way, seen from an event loop; Mailbox: what the engine's thread knows of it.

The thread keeps mailboxes and no streams. So a stream that nobody holds any more is collected, which ends its request::

    caller -- AnswerStream -- Mailbox -- engine's thread
                 |  __del__ / aclose: the request is to end      (a command)
                 `- waits for letters                            (call_soon_threadsafe, in the caller's loop)
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self, final

from pagedkv.serving.engine.outputs import RequestOutput
from pagedkv.serving.engine.updates import TokenUpdate

__all__ = ["AnswerStream", "Letter", "Mailbox", "deliver"]


@final
class Mailbox:
    """What came for one request. The engine's thread writes letters, the loop alone opens them.

    Args:
        loop: whose callbacks open letters.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.updates: deque[TokenUpdate] = deque()
        self.is_accepted = False
        self.num_cached_tokens: int | None = None
        self.output: RequestOutput | None = None
        self.problem: Exception | None = None
        self.changed = asyncio.Event()
        self.ended = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self.output is not None or self.problem is not None


@dataclass(frozen=True, slots=True, eq=False)
class Letter:
    """Something new about a request.

    Args:
        mailbox: whose.
        updates: new tokens; output: its end; problem: why it was not served.
        num_cached_tokens: tokens of its prompt that were hit, once it was admitted.
    """

    mailbox: Mailbox
    updates: tuple[TokenUpdate, ...] = ()
    output: RequestOutput | None = None
    problem: Exception | None = None
    num_cached_tokens: int | None = None


def deliver(letters: Iterable[Letter]) -> None:
    """Open letters, in the loop that their mailboxes belong to."""
    for letter in letters:
        mailbox = letter.mailbox
        mailbox.is_accepted |= letter.problem is None
        mailbox.updates.extend(letter.updates)
        if letter.num_cached_tokens is not None:
            mailbox.num_cached_tokens = letter.num_cached_tokens
        mailbox.output = mailbox.output or letter.output
        mailbox.problem = mailbox.problem or letter.problem
        mailbox.changed.set()
        if mailbox.is_over:
            mailbox.ended.set()


@final
class AnswerStream:
    """The answers to one prompt: new tokens by ``async for``, all of it by :meth:`output`.

    Whoever stops waiting ends the request, whose blocks are then free for others: a task that is cancelled while it
    waits here, :meth:`aclose`, or a stream that nobody holds any more.

    Args:
        mailbox: what comes for it.
        end: tells the engine that nobody wants it any more; called at any time, in any thread.
    """

    def __init__(self, mailbox: Mailbox, end: Callable[[Mailbox], None]) -> None:
        self._mailbox = mailbox
        self._end = end

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenUpdate:
        """Wait for new tokens of any of the answers. Raises as :meth:`output`, after what came before."""
        mailbox = self._mailbox
        await self._wait_for_updates()
        if mailbox.updates:
            return mailbox.updates.popleft()
        self._raise_problem()
        raise StopAsyncIteration

    async def take(self) -> tuple[TokenUpdate, ...]:
        """Wait for new tokens, and return all that have come; empty at the end. Raises as :meth:`output`, at the end.

        A reader that was slow so gets in one piece what came meanwhile.
        """
        await self._wait_for_updates()
        taken = self.taken()
        if not taken:
            self._raise_problem()
        return taken

    def taken(self) -> tuple[TokenUpdate, ...]:
        """Return new tokens that have come and were not read; waits for none. O(updates)."""
        updates = self._mailbox.updates
        taken = tuple(updates)
        updates.clear()
        return taken

    @property
    def result(self) -> RequestOutput | None:
        """All answers, where they have ended; None before, and where the request was not served."""
        return self._mailbox.output

    @property
    def num_cached_tokens(self) -> int | None:
        """Tokens of the prompt that were hit; None before the first tokens of an answer."""
        return self._mailbox.num_cached_tokens

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self._mailbox.is_over

    @property
    def num_unread(self) -> int:
        """New tokens that have come and were not read, of the answer with the most. O(updates)."""
        by_answer: dict[int, int] = {}
        for each in self._mailbox.updates:
            by_answer[each.index] = by_answer.get(each.index, 0) + len(each.token_ids)
        return max(by_answer.values(), default=0)

    async def accepted(self) -> None:
        """Wait until the engine has taken the request into its queue; who then goes on feels back-pressure.

        Raises:
            RequestError: it cannot be served.
            QueueFullError: as many wait as may, and the engine was told to refuse more.
            EngineError: the engine has failed, or was closed.
        """
        mailbox = self._mailbox
        while not mailbox.is_accepted and not mailbox.is_over:
            await self._wait(mailbox.changed)
        self._raise_problem()

    async def output(self) -> RequestOutput:
        """Wait for the end of all answers; updates need not be read. Raises as :meth:`accepted`.

        The task that waits runs once, at the end, not for each new token.
        """
        if not self._mailbox.is_over:
            await self._wait(self._mailbox.ended)
        self._raise_problem()
        assert self._mailbox.output is not None, "a stream is over without an output"
        return self._mailbox.output

    async def aclose(self) -> None:
        """End the request now; :meth:`output` then tells what it had. One that is over stays as it is."""
        self._close()

    async def _wait_for_updates(self) -> None:
        """Wait until new tokens have come, or nothing more comes."""
        mailbox = self._mailbox
        while not mailbox.updates and not mailbox.is_over:
            await self._wait(mailbox.changed)

    async def _wait(self, event: asyncio.Event) -> None:
        """Wait for an event of the mailbox; a task that is cancelled meanwhile ends the request."""
        event.clear()
        try:
            await event.wait()
        except asyncio.CancelledError:
            self._close()
            raise

    def _raise_problem(self) -> None:
        if self._mailbox.problem is not None:
            raise self._mailbox.problem

    def _close(self) -> None:
        if not self._mailbox.is_over:
            self._end(self._mailbox)

    def __del__(self) -> None:
        self._close()
