"""waits_of(): which answers a call of an agent waited for, and how long it paused after them.

A call follows the call before it of its agent, after a pause in which tools ran or a user thought. It also follows all
of the agent's subagents that have ended since: their results are in its prompt. The first call of a subagent follows
its parent's call before it. Subagents run side by side; one that ends after its parent's next call runs in the
background, and a later call may follow it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AgentCall:
    """A call of an agent.

    Args:
        agent: name of the agent.
        parent: name of the agent whose subagent it is; None: of none.
        begin_s: its begin; api_s: seconds of its answer, None: unknown.
    """

    agent: str
    parent: str | None
    begin_s: float
    api_s: float | None

    @property
    def end_s(self) -> float:
        """The end of its answer; its begin, if that is not known."""
        return self.begin_s + (self.api_s or 0.0)


@dataclass(frozen=True, slots=True)
class Wait:
    """What a call waited for: the last answers of agents, and a pause behind them, None: its length is unknown."""

    agents: tuple[str, ...]
    pause_s: float | None


def waits_of(calls: Sequence[AgentCall]) -> Iterator[Wait]:
    """Yield what each call of a session waited for, in order of their begins. O(calls)."""
    last: dict[str, AgentCall] = {}
    ends_s: dict[str, float] = {}
    for call in calls:
        ends_s[call.agent] = max(ends_s.get(call.agent, 0.0), call.end_s)
    running: dict[str, list[str]] = {}
    for call in calls:
        if call.agent in last:
            subagents = running.pop(call.agent, [])
            ended = [each for each in subagents if ends_s[each] <= call.begin_s]
            running[call.agent] = [each for each in subagents if each not in ended]
            agents = (call.agent, *ended)
        elif call.parent is not None:
            running.setdefault(call.parent, []).append(call.agent)
            agents = (call.parent,) if call.parent in last else ()
        else:
            agents = ()
        before = [last[each] for each in agents]
        is_known = bool(before) and all(each.api_s is not None for each in before)
        yield Wait(agents, max(0.0, call.begin_s - max(each.end_s for each in before)) if is_known else None)
        last[call.agent] = call
