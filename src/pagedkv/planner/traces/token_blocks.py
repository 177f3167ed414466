"""Tokens and blocks of requests: made from texts or ids, chained into digests, made anonymous.

Texts of logs become tokens by a tokenizer's file, or by a fixed number of characters a token. Only the number of tokens
matters here, and that equal texts have equal tokens. So without a tokenizer a text is cut into pieces of a stated
number of characters. A piece's token is a hash of it, the same on every machine (splitmix64 of its characters and their
places, 31 bits). Texts that end differently differ in their last piece alone. A piece never crosses the end of a text,
so a conversation whose messages are passed one by one begins with the tokens of the conversation before.

Tokens for every request of a trace: its own, or else a fixed function of block ids, the same on every machine.

Tokens of prompts or outputs in the trace are used. All others are generated.

An id of a trace stands for a block of tokens *together with everything before it*: equal ids mean an equal
whole prefix. So the tokens of a block may be a function of its id and the offset alone. Equal prefixes stay equal, and
different prefixes differ from the first token of the first block whose ids differ, whatever block size the replay
uses. (Text that two different blocks had in common cannot be restored from a trace, and is lost.)

Tokens that no id covers are not shared, since the trace shows no sharing of them: the end of a prompt past its ids,
prompts without ids, and all output.

The function is splitmix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA
2014): the token at offset o is the o-th number, reduced to 31 bits, of the generator that starts from a
mixed key. Keys are disjoint by construction::

    bit 63    bits 62..1            bit 0
    0         block id ------------------        tokens that ids cover
    1         number of the request  part        part 0: rest of the prompt, part 1: output

Block ids from tokens: cuts prompts into blocks, and names each block by its content and everything before it.

Distinct content gets consecutive ids, from 0, in order of first appearance. Two prompts have the same id at a position
if and only if they are equal up to the end of that block. Only full blocks get ids, since an engine caches only these.

Requests without their texts: salted digests still show which prompts begin alike.

From tokens, the tokenizer or a list of words restores the text. So each full block is named by a digest over the salt,
the previous block and its tokens; all tokens, those of the output too, are removed. Names of sessions become digests as
well. Without the salt, a known text cannot be searched for in the trace. Two traces with the same salt can be merged.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from hashlib import sha256
from hmac import digest
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.extras import to_install
from pagedkv.errors import ConfigurationError, TraceError
from pagedkv.planner.traces.request import Request, TokenizedRequest

CHARS_PER_TOKEN: Final = 4.0
"""Roughly the value of English text with today's vocabularies; results that depend on it are marked as estimates."""
MOST_CHARS_PER_TOKEN: Final = 1000
FIRST_MULTIPLIER: Final = np.uint64(0xBF58476D1CE4E5B9)
SECOND_MULTIPLIER: Final = np.uint64(0x94D049BB133111EB)


class TextTokens(Protocol):
    """Turns texts into tokens."""

    is_estimate: bool
    """Whether the number of tokens is only an estimate."""

    @property
    def description(self) -> str:
        """How texts become tokens, as text for users."""
        ...

    def token_ids(self, text: str) -> Int32Array:
        """Make the tokens of one text: int32 ``[n]``, none negative; none of an empty text. O(characters)."""
        ...


class CharacterTokens:
    """Makes tokens of a fixed number of characters.

    Args:
        chars_per_token: a number from 1 to 1,000, possibly a fraction.

    Raises:
        ConfigurationError: the number is out of range.

    >>> tokens = CharacterTokens(4)
    >>> [len(tokens.token_ids(text)) for text in ("", "four", "fives")]
    [0, 1, 2]
    >>> bool((tokens.token_ids("equal to here")[:2] == tokens.token_ids("equal to there")[:2]).all())
    True
    """

    is_estimate = True

    def __init__(self, chars_per_token: float = CHARS_PER_TOKEN) -> None:
        if not 1 <= chars_per_token <= MOST_CHARS_PER_TOKEN:
            raise ConfigurationError(
                f"`chars_per_token` must be from 1 to {MOST_CHARS_PER_TOKEN:,}, got {chars_per_token}"
            )
        self._chars = chars_per_token

    @property
    def description(self) -> str:
        """How texts become tokens, as text for users."""
        return f"{self._chars:g} characters a token"

    def token_ids(self, text: str) -> Int32Array:
        """Make the tokens of one text."""
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        num_tokens = int(-(-len(codes) // self._chars))
        if num_tokens == 0:
            return np.zeros(0, np.int32)
        starts = (np.arange(num_tokens) * self._chars).astype(np.int64)
        places = np.arange(len(codes)) - np.repeat(starts, np.diff(starts, append=len(codes)))
        hashes = np.bitwise_xor.reduceat(
            _mixed(codes.astype(np.uint64) << np.uint64(20) | places.astype(np.uint64)), starts
        )
        return (_mixed(hashes) >> np.uint64(33)).astype(np.int32)


class FileTokens:
    """Uses a file of Hugging Face's tokenizers (tokenizer.json).

    Raises:
        ConfigurationError: the package is missing, or the file is not such a file.
    """

    is_estimate = False

    def __init__(self, path: str) -> None:
        try:
            tokenizers: Any = import_module("tokenizers")  # an optional package
        except ModuleNotFoundError as error:
            reason = f"`tokenizer` needs the package tokenizers: {to_install('tokenizer')}"
            raise ConfigurationError(f"{reason}, or give `chars_per_token` instead") from error
        if not Path(path).is_file():
            raise ConfigurationError(f"`tokenizer` {path}: there is no such file; name a tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(path)
        except Exception as error:  # the package raises nothing more special
            raise ConfigurationError(f"`tokenizer` {path}: cannot be read as a tokenizer.json: {error}") from error
        self._name = Path(path).name

    @property
    def description(self) -> str:
        """How texts become tokens, as text for users."""
        return f"tokens of {self._name}"

    def token_ids(self, text: str) -> Int32Array:
        """Make the tokens of one text, without those that the tokenizer adds around a whole prompt."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)


def text_tokens(tokenizer: str | None, chars_per_token: float | None) -> TextTokens:
    """Make the object that turns texts into tokens. Raises ConfigurationError."""
    if tokenizer is None:
        return CharacterTokens(CHARS_PER_TOKEN if chars_per_token is None else chars_per_token)
    if chars_per_token is not None:
        raise ConfigurationError("`tokenizer` and `chars_per_token` both define tokens: give one of them")
    return FileTokens(tokenizer)


def marked_tokens(digest: bytes, num_tokens: int) -> Int32Array:
    """Make tokens for content of which only a digest is known: int32 ``[num_tokens]``, none negative."""
    seed = np.uint64(int.from_bytes(digest[:8], "little"))
    numbers = _mixed(np.full(num_tokens, seed) ^ _mixed(np.arange(num_tokens, dtype=np.uint64)))
    return (numbers >> np.uint64(33)).astype(np.int32)


def stretched_tokens(pieces: Int32Array, rate: tuple[int, int], num_tokens: int, digest: bytes) -> Int32Array:
    """Turn pieces of a text into a given number of tokens; equal leading pieces give equal leading tokens.

    Args:
        pieces: int32 ``[n]``.
        rate: a number of tokens, and the number of pieces from which they are made. Texts that begin alike must have
            the same rate. If the two numbers are equal, a piece is its token.
        num_tokens: tokens to make. If the rate gives more, the others are left out; if it gives fewer, tokens from the
            digest follow.
        digest: digest of the whole text; the last token comes from it if others were left out.

    Returns:
        int32 ``[num_tokens]``, none negative. O(pieces + tokens).
    """
    most, least = rate
    num_made = len(pieces) * most // least
    made = np.arange(min(num_made, num_tokens))
    places = made * least // most  # of the piece with which each token begins
    if most == least:
        tokens = pieces[: len(made)]
    elif most > least:
        behind = (made - -(-places * most // least)).astype(np.uint64)
        mixed = _mixed(pieces[places].astype(np.uint64) << np.uint64(20) | behind) >> np.uint64(33)
        tokens = np.where(behind == 0, pieces[places], mixed.astype(np.int32))
    else:
        end = int((made[-1] + 1) * least // most) if len(made) else 0
        inside = np.arange(end) - np.repeat(places, np.diff(places, append=end))
        numbers = _mixed(pieces[:end].astype(np.uint64) << np.uint64(20) | inside.astype(np.uint64))
        hashes = np.bitwise_xor.reduceat(numbers, places) if end else numbers
        tokens = (_mixed(hashes) >> np.uint64(33)).astype(np.int32)
    if num_made == num_tokens:
        return tokens
    if num_made > num_tokens > 0:
        tokens = np.concatenate([tokens[:-1], marked_tokens(digest, 1)])
    return np.concatenate([tokens, marked_tokens(digest, num_tokens - len(tokens))])


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply splitmix64's finaliser."""
    mixed = numbers ^ (numbers >> np.uint64(30))
    mixed *= FIRST_MULTIPLIER
    mixed ^= mixed >> np.uint64(27)
    mixed *= SECOND_MULTIPLIER
    mixed ^= mixed >> np.uint64(31)
    return mixed


GOLDEN_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
UNIQUE_KEYS: Final = 1 << 63
PROMPT_PART: Final = 0
OUTPUT_PART: Final = 1


def block_token_ids(block_ids: npt.NDArray[np.int64], block_size: int) -> npt.NDArray[np.int32]:
    """Make the tokens of blocks.

    Args:
        block_ids: int64 ``[n]``, none negative.
        block_size: tokens of each block.

    Returns:
        int32 ``[n * block_size]``, none negative. O(n * block_size), 2 to 10 ns a token.
    """
    return _numbers(block_ids.astype(np.uint64), block_size)


def unique_token_ids(request_number: int, part: int, num_tokens: int) -> npt.NDArray[np.int32]:
    """Make tokens that differ from those of all block ids and of all other requests and parts.

    Args:
        request_number: position of the request in its trace, from 0.
        part: ``PROMPT_PART`` or ``OUTPUT_PART``.
        num_tokens: number of tokens.

    Returns:
        int32 ``[num_tokens]``, none negative.
    """
    key = UNIQUE_KEYS | request_number << 1 | part
    return _numbers(np.array([key], dtype=np.uint64), num_tokens)


def tokenized(requests: Iterable[Request]) -> Iterator[TokenizedRequest]:
    """Yield each request of a trace with its tokens; requests are numbered from 0."""
    for number, request in enumerate(requests):
        yield tokenize(request, number)


def tokenize(request: Request, number: int) -> TokenizedRequest:
    """Return a request with its tokens; ``number`` is its position in the trace, from 0."""
    return TokenizedRequest(
        arrival_s=request.arrival_s,
        prompt_token_ids=_prompt_token_ids(request, number),
        output_token_ids=_output_token_ids(request, number),
        session=request.session,
        num_samples=request.num_samples,
        priority=request.priority,
        has_content=request.has_content,
        tenant=request.tenant,
        salt=request.salt,
    )


def _prompt_token_ids(request: Request, number: int) -> npt.NDArray[np.int32]:
    if request.prompt_token_ids is not None:
        return request.prompt_token_ids
    if request.block_ids is None:
        return unique_token_ids(number, PROMPT_PART, request.input_length)
    covered = block_token_ids(request.block_ids, request.block_size)[: request.input_length]
    rest = unique_token_ids(number, PROMPT_PART, request.input_length - len(covered))
    return np.concatenate((covered, rest))


def _output_token_ids(request: Request, number: int) -> npt.NDArray[np.int32]:
    if request.output_token_ids is not None:
        return request.output_token_ids
    return unique_token_ids(number, OUTPUT_PART, request.output_length)


def _numbers(keys: npt.NDArray[np.uint64], count: int) -> npt.NDArray[np.int32]:
    """Draw ``count`` 31-bit numbers from the generator of each key, generator by generator."""
    steps = np.arange(1, count + 1, dtype=np.uint64) * GOLDEN_GAMMA
    states = _mixed(_mixed(keys)[:, np.newaxis] + steps)
    return (states >> np.uint64(33)).astype(np.int32).ravel()


FIRST_UNSHARED: Final = 2**62
"""First id of prompts of unknown content; ids by first appearance are smaller."""
COUNTED_BITS: Final = 40
COUNTED: Final = 2**COUNTED_BITS
"""Ids below this are numbers of blocks."""
MIXED: Final = 2**62
WORD: Final = 2**64 - 1
MOST_HELD: Final = 1000
"""Most requests without content that are held until one has content."""


class TokenBlocks:
    """Numbers the distinct blocks of prompts.

    It remembers 32 bytes and an id for each distinct block, whatever its size: a SHA-256 digest over its tokens and the
    previous digest.

    Args:
        block_size: tokens of a block.

    Raises:
        ConfigurationError: ``block_size`` is not positive.
    """

    def __init__(self, block_size: int) -> None:
        if block_size < 1:
            raise ConfigurationError(f"block_size must be at least 1 token, got {block_size}")
        self._block_size = block_size
        self._ids_by_digest: dict[bytes, int] = {}

    def block_ids(self, token_ids: npt.NDArray[np.int32], salt: str | None = None) -> npt.NDArray[np.int64]:
        """Name the full blocks of a prompt; new ones are numbered.

        Args:
            token_ids: int32 ``[n]``.
            salt: blocks with equal tokens and different salts get different ids.

        Returns:
            int64 ``[n // block_size]``. O(n).

        >>> blocks = TokenBlocks(2)
        >>> blocks.block_ids(np.array([5, 6, 7, 8, 9], np.int32)).tolist()
        [0, 1]
        >>> blocks.block_ids(np.array([5, 6, 7, 7, 7, 8], np.int32)).tolist()
        [0, 2, 3]
        """
        ids = np.empty(len(token_ids) // self._block_size, np.int64)
        parent = b"" if salt is None else sha256(salt.encode()).digest()
        for position, name in enumerate(chain_digests(token_ids, self._block_size, parent)):
            ids[position] = self._ids_by_digest.setdefault(name, len(self._ids_by_digest))
        return ids

    def __len__(self) -> int:
        """Return the number of distinct blocks."""
        return len(self._ids_by_digest)

    def has_block(self, digest: bytes) -> bool:
        """Return whether a prompt without a salt had the block with this digest of :func:`chain_digests`."""
        return digest in self._ids_by_digest


class ContentBlocks:
    """Replaces tokens by block ids, where a trace has tokens; requests with ids are unchanged.

    A prompt without content, in a trace where others have content, shares no block, as in a replay. If none of the
    first thousand requests has content, nothing is changed.

    Args:
        block_size: tokens of a block.

    Raises:
        ConfigurationError: ``block_size`` is not positive.

    Attributes:
        num_unshared: prompts without content that got blocks of their own.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks = TokenBlocks(block_size)
        self._next_unshared = FIRST_UNSHARED
        self._has_tokens = False
        self._salts: dict[str, int] = {}
        self.num_unshared = 0

    def of(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Yield the requests with ids. O(tokens); memory as :class:`TokenBlocks`."""
        return (request for request, _ in self._named(requests, keeps_answers=False))

    def with_answers(self, requests: Iterable[Request]) -> Iterator[tuple[Request, int]]:
        """Yield the requests with ids of their prompts and answers, and the number of ids at the end for the answer.

        An engine keeps the blocks of an answer after those of its prompt, and the next turn hits them. They contain
        only computed tokens, and the last token is never computed. If the first block of an answer is not new, the
        answer gets no ids, so that ids of answers are always new; of two answers that begin alike the first gets ids.
        O(tokens).
        """
        return self._named(requests, keeps_answers=True)

    def _named(self, requests: Iterable[Request], *, keeps_answers: bool) -> Iterator[tuple[Request, int]]:
        held: list[Request] | None = []
        for request in requests:
            if held is not None and not request.has_content:
                held.append(request)
                if len(held) <= MOST_HELD:
                    continue
            elif request.prompt_token_ids is not None:
                self._has_tokens = True
            waiting, held = held or (), None
            for each in waiting:
                yield self._with_ids(each, keeps_answers=keeps_answers)
            if not waiting or waiting[-1] is not request:
                yield self._with_ids(request, keeps_answers=keeps_answers)
        yield from ((request, 0) for request in held or ())

    def _with_ids(self, request: Request, *, keeps_answers: bool) -> tuple[Request, int]:
        num_answer_blocks = 0
        if request.prompt_token_ids is not None:
            ids = self._blocks.block_ids(request.prompt_token_ids, request.salt)
            if keeps_answers and request.output_token_ids is not None:
                answer = self._answer_ids(request, request.prompt_token_ids, request.output_token_ids)
                ids, num_answer_blocks = np.concatenate([ids, answer]), len(answer)
        elif request.block_ids is None and self._has_tokens:
            first, num_blocks = self._next_unshared, request.input_length // self._block_size
            self._next_unshared += num_blocks
            self.num_unshared += 1
            ids = np.arange(first, first + num_blocks, dtype=np.int64)
        else:
            return self._apart(request), 0
        named = replace(
            request, block_ids=ids, block_size=self._block_size, prompt_token_ids=None, output_token_ids=None
        )
        return named, num_answer_blocks

    def _answer_ids(
        self, request: Request, prompt: npt.NDArray[np.int32], answer: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int64]:
        """Return ids of the blocks that an answer adds; none if the first of them is not new."""
        num_known, num_prompt_blocks = len(self._blocks), len(prompt) // self._block_size
        if (len(prompt) + len(answer) - 1) // self._block_size <= num_prompt_blocks:
            return np.empty(0, np.int64)
        ids = self._blocks.block_ids(np.concatenate([prompt, answer[:-1]]), request.salt)[num_prompt_blocks:]
        return ids if ids[0] >= num_known else ids[:0]

    def _apart(self, request: Request) -> Request:
        """Make the ids of a request with a salt distinct from those of others."""
        if request.block_ids is None or request.salt is None:
            return request
        return with_ids_apart(request, self._salts.setdefault(request.salt, len(self._salts)))


def with_ids_apart(request: Request, number: int) -> Request:
    """Make the block ids of a request distinct from those of other numberings.

    Exact for ids below 2^40, as numbers of blocks are. Larger ids, such as digests, are mixed; two of them are then
    equal with a probability of 2^-62, as digests are.

    Args:
        request: a request with or without ids.
        number: the numbering of the ids, below 2^22; 0 leaves ids below 2^40 unchanged.
    """
    if request.block_ids is None or not len(request.block_ids):
        return request
    ids = request.block_ids
    small = ids < COUNTED
    moved = np.where(small, ids | (number << COUNTED_BITS), _moved(ids, number) if not small.all() else ids)
    return replace(request, block_ids=moved)


def _moved(ids: npt.NDArray[np.int64], number: int) -> npt.NDArray[np.int64]:
    """Mix ids with a number, by the finaliser of splitmix64 (see :mod:`~pagedkv.planner.traces.token_blocks`)."""
    mixed = _mixed(ids.astype(np.uint64) + np.uint64(number * int(GOLDEN_GAMMA) & WORD))
    return (mixed >> np.uint64(2) | np.uint64(MIXED)).astype(np.int64)


def chain_digests(token_ids: npt.NDArray[np.int32], block_size: int, parent: bytes = b"") -> Iterator[bytes]:
    """Yield SHA-256 digests of full blocks, each over the previous digest and the block's tokens.

    Args:
        token_ids: int32 ``[n]``.
        block_size: tokens of a block, at least 1.
        parent: digest of the block before the first; empty: there is none.

    Returns:
        ``n // block_size`` digests of 32 bytes. O(n).
    """
    data = token_ids.astype("<i4").tobytes()
    nbytes = 4 * block_size
    digest = parent
    for position in range(len(token_ids) // block_size):
        digest = sha256(digest + data[position * nbytes : (position + 1) * nbytes]).digest()
        yield digest


def with_block_ids(path: str, requests: Iterable[Request], block_size: int) -> Iterator[Request]:
    """Replace tokens by block ids. Tokens of the output are removed too; their number remains.

    Args:
        path: the trace, for messages.
        requests: requests with the tokens of their prompts; one of unknown content keeps only its lengths.
        block_size: tokens of a block.

    Raises:
        ConfigurationError: ``block_size`` is not positive.
        TraceError: a request has other block ids already; or, at the end, no request had tokens.
    """
    blocks = TokenBlocks(block_size)
    number, has_tokens = 0, False
    for number, request in enumerate(requests, 1):
        has_tokens |= request.prompt_token_ids is not None
        if request.block_ids is not None and request.prompt_token_ids is None:
            raise _without_tokens(path, f"request {number} has no tokens")
        ids = None if request.prompt_token_ids is None else blocks.block_ids(request.prompt_token_ids)
        yield replace(request, block_ids=ids, block_size=block_size, prompt_token_ids=None, output_token_ids=None)
    if number and not has_tokens:
        raise _without_tokens(path, "no request has tokens")


def _without_tokens(path: str, reason: str) -> TraceError:
    remedy = "Give `block_size` only for a log with texts or a trace with token_ids"
    return TraceError(path, None, f"{reason} to make block ids of", remedy)


DEFAULT_BLOCK_SIZE: Final = 16
ID_NBYTES: Final = 8
LARGEST_ID: Final = 2**63 - 1
SESSION_CHARACTERS: Final = 16


def anonymized(requests: Iterable[Request], salt: bytes, block_size: int | None = None) -> Iterator[Request]:
    """Remove texts and names from requests.

    Args:
        requests: requests with tokens. Requests without tokens have no text: only their names of sessions and tenants
            are replaced.
        salt: any bytes, kept secret.
        block_size: tokens of a block, 16 by default.

    Returns:
        the requests, with ids of full blocks below 2**63. O(tokens), and no memory for finished requests.

    Raises:
        ConfigurationError: the block size is not positive.
    """
    size = DEFAULT_BLOCK_SIZE if block_size is None else block_size
    if size < 1:
        raise ConfigurationError(f"`block_size` must be at least 1 token, got {size}")
    for request in requests:
        session = None if request.session is None else _name(salt, request.session)
        tenant = None if request.tenant is None else _name(salt, request.tenant)
        if request.prompt_token_ids is None:
            known = request.block_size or (size if request.block_ids is None else 0)  # else for the header
            yield replace(request, session=session, tenant=tenant, block_size=known, output_token_ids=None)
        else:
            ids = _block_ids(salt, request.prompt_token_ids, size)
            yield replace(
                request,
                session=session,
                tenant=tenant,
                block_ids=ids,
                block_size=size,
                prompt_token_ids=None,
                output_token_ids=None,
            )


def _block_ids(salt: bytes, token_ids: Int32Array, block_size: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    ids = np.empty(len(token_ids) // block_size, np.int64)
    first = digest(salt, block_size.to_bytes(8, "little"), "sha256")
    for position, name in enumerate(chain_digests(token_ids, block_size, first)):
        ids[position] = int.from_bytes(name[:ID_NBYTES], "little") & LARGEST_ID
    return ids


def _name(salt: bytes, session: str) -> str:
    return digest(salt, session.encode(), "sha256").hex()[:SESSION_CHARACTERS]
