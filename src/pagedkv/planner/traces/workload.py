"""A conversation workload, generated from a seed, for runs without a trace.

Sessions start at random, pick one of a few shared system prompts, and take turns. The prompt of turn k + 1 is the
prompt and the answer of turn k followed by the user's next text, so that a prefix cache may hit prompts *and*
generated tokens. Turns of different sessions interleave by time::

    turn 1   [system prompt][user 1]                      -> [answer 1]
    turn 2   [system prompt][user 1][answer 1][user 2]    -> [answer 2]

Where the default lengths come from:

* User turns: log-normal, median 70, sigma 1.3 (mean 163). ShareGPT prompts have a mean of 161 tokens
  (Kwon et al., PagedAttention, SOSP 2023, Fig. 11), those of LMSYS-Chat-1M 69.5 (Zheng et al., 2023, Table 1).
* Answers: log-normal, median 200, sigma 1.0 (mean 330). ShareGPT answers have a mean of 338 tokens (as above),
  LMSYS-Chat-1M 215, the Azure 2023 conversation trace 211 with a median of 129, which is a sigma of 1.0
  (Patel et al., Splitwise, ISCA 2024; repository Azure/AzurePublicDataset).
* Turns: geometric, mean 3.7. 73% of ShareGPT conversations have more than one turn (Gao et al., AttentionStore,
  later CachedAttention, USENIX ATC 2024); a geometric number of turns with 1 - 1 / mean = 0.73 has that mean.

Where nothing is published, round figures: system prompts of 256 to 2,048 tokens, the k-th most popular picked in
proportion to 1 / k; Poisson arrivals of one session a second; exponential think times of 60 s in the mean;
answers at 50 tokens a second. A session ends early when its next request would not fit the context window.

Every session draws from a generator of its own, seeded with the workload's seed and the session's number. So the same
seed and the same version of NumPy give the same requests, and a larger number of sessions only adds requests.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from pagedkv.errors import ConfigurationError
from pagedkv.planner.traces.request import TokenizedRequest

VOCABULARY_SIZE: Final = 128_256
"""Llama 3's; tokens are drawn uniformly from it."""
SHARED_STREAM: Final = 0
"""Random stream of the shared values: system prompts and starting times."""
SESSION_STREAM: Final = 1
"""Random streams of the sessions, each with a further number."""


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A log-normal number of tokens, rounded up to at least one.

    Args:
        median: tokens.
        sigma: standard deviation of the logarithm.
    """

    median: float
    sigma: float

    def draw(self, random: np.random.Generator) -> int:
        """Draw one length (advances ``random``)."""
        return max(1, round(float(random.lognormal(np.log(self.median), self.sigma))))


@dataclass(frozen=True, slots=True)
class ConversationWorkload:
    """Parameters of the workload; iterate over :meth:`requests`. See the module's text for the sources.

    Args:
        seed: determines all random values.
        num_sessions: conversations.
        system_prompt_lengths: tokens of each shared system prompt, most popular first.
        user_turn: tokens the user adds each turn.
        answer: tokens generated each turn.
        mean_turns: mean of the geometric number of turns a session.
        sessions_per_s: rate of the Poisson process that starts sessions.
        mean_think_s: mean of the exponential pause between an answer's end and the next turn.
        output_tokens_per_s: speed at which answers appear.
        max_context: tokens that prompt and answer of a turn may take together.

    Raises:
        ConfigurationError: a parameter is out of range.
    """

    seed: int = 0
    num_sessions: int = 1000
    system_prompt_lengths: tuple[int, ...] = (1024, 512, 2048, 256)
    user_turn: LogNormal = LogNormal(median=70, sigma=1.3)
    answer: LogNormal = LogNormal(median=200, sigma=1.0)
    mean_turns: float = 3.7
    sessions_per_s: float = 1.0
    mean_think_s: float = 60.0
    output_tokens_per_s: float = 50.0
    max_context: int = 32_768

    def __post_init__(self) -> None:
        """Check the parameters that a user may set."""
        if self.seed < 0:
            raise ConfigurationError(f"the seed must not be negative, got {self.seed}")
        if self.num_sessions < 1:
            raise ConfigurationError(f"the number of sessions must be at least 1, got {self.num_sessions}")

    def requests(self) -> Iterator[TokenizedRequest]:
        """Yield the requests of all sessions in order of time. Only sessions under way are in memory."""
        random = np.random.default_rng((self.seed, SHARED_STREAM))
        system_prompts = [_random_tokens(random, length) for length in self.system_prompt_lengths]
        under_way: list[_SessionUnderWay] = []
        start_s = 0.0
        for session in range(self.num_sessions):
            yield from _requests_before(start_s, under_way)
            _resume(under_way, session, self._turns(session, start_s, system_prompts))
            start_s += random.exponential(1 / self.sessions_per_s)
        yield from _requests_before(math.inf, under_way)

    def _turns(
        self, session: int, start_s: float, system_prompts: list[npt.NDArray[np.int32]]
    ) -> Iterator[TokenizedRequest]:
        """Yield the turns of one session, each containing the one before it."""
        random = np.random.default_rng((self.seed, SESSION_STREAM, session))
        context = system_prompts[_pick_by_popularity(random, len(system_prompts))]
        arrival_s = start_s
        for _ in range(random.geometric(1 / self.mean_turns)):
            prompt_token_ids = np.concatenate((context, _random_tokens(random, self.user_turn.draw(random))))
            output_token_ids = _random_tokens(random, self.answer.draw(random))
            context = np.concatenate((prompt_token_ids, output_token_ids))
            if len(context) > self.max_context:
                return
            yield TokenizedRequest(arrival_s, prompt_token_ids, output_token_ids, session=f"session-{session}")
            arrival_s += len(output_token_ids) / self.output_tokens_per_s + random.exponential(self.mean_think_s)


_SessionUnderWay: TypeAlias = tuple[float, int, TokenizedRequest, Iterator[TokenizedRequest]]
"""Arrival and session number, which order the sessions; the next request, and those after it."""


def _resume(under_way: list[_SessionUnderWay], session: int, turns: Iterator[TokenizedRequest]) -> None:
    """Put a session back in the heap with its next turn, unless it is over."""
    request = next(turns, None)
    if request is not None:
        heapq.heappush(under_way, (request.arrival_s, session, request, turns))


def _requests_before(end_s: float, under_way: list[_SessionUnderWay]) -> Iterator[TokenizedRequest]:
    """Yield, in order of time, the requests of the sessions under way that arrive before ``end_s``."""
    while under_way and under_way[0][0] < end_s:
        _, session, request, turns = heapq.heappop(under_way)
        yield request
        _resume(under_way, session, turns)


def _random_tokens(random: np.random.Generator, num_tokens: int) -> npt.NDArray[np.int32]:
    return random.integers(VOCABULARY_SIZE, size=num_tokens, dtype=np.int32)


def _pick_by_popularity(random: np.random.Generator, num_choices: int) -> int:
    """Pick the k-th of ``num_choices`` with a probability proportional to 1 / k (Zipf)."""
    weights = 1 / np.arange(1, num_choices + 1)
    return int(random.choice(num_choices, p=weights / weights.sum()))
