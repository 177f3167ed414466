"""Every error that pagedkv raises, from every room, as one tree; it imports nothing.

A shortage is an answer, not an error: an operation that finds too few free blocks changes nothing and returns a
:class:`~pagedkv.contract.answers.Shortage`. In the classic block managers, checks such as ``can_allocate``
answer ``AllocStatus.LATER``, and actions that are called all the same raise :class:`OutOfBlocksError`. A lack of rows
is no shortage: their number is fixed, and the caller, who has all sequences, can count those that are left, while only
the space knows which blocks are free and what a prompt shares. So more sequences than rows are misuse.
Misuse raises an error that states the numbers. A broken invariant is a fault of this library and raises
``AssertionError``, which stops the program.

::

    PagedKVError
    |-- ConfigurationError        a size, fraction or combination that cannot work
    |-- TokenError                empty prompt, ids outside int32, wrong shape or dtype
    |-- OutOfBlocksError          a classic action without the check before it, or a row asked of a shortage
    |-- TooManySequencesError     more sequences at once than rows were configured
    |-- SequenceError             the sequence or row is not in a state that allows this
    |   |-- UnknownSequenceError  never allocated here
    |   |-- FreedSequenceError    freed before: double free, use after free
    |   |-- SwappedOutError       its blocks are in the host pool
    |   `-- LostSequenceError     an aborted step left its memory undefined
    |-- SharedPrefixError         truncating into blocks that another sequence or a ticket refers to
    |-- TruncationError           the content needed at that length is gone, or the length is impossible
    |-- NoHostPoolError           swapping without a host pool
    |-- BlockError                a block id or ticket that is foreign, free, or released twice
    |-- StepError                 steps acknowledged or aborted out of order
    |-- InterruptedSpaceError     an operation was interrupted midway; build the space again
    |-- PlanError                 a buffer that is no plan: cut short, corrupt, of another version
    |-- TensorError               a tensor of the wrong type, shape or device, unpinned, or with slots out of range
    |-- StorageError              releasing memory that is in use, or using memory that is released
    |-- SamplingError             a row without an allowed token, or a custom processor with a wrong result
    |-- MissingExtraError         a package of an extra of pagedkv is not installed: which one, and pip's command
    |-- DeviceUnavailableError    Triton or a GPU was requested on a machine without one
    |-- DeviceLostError           the device failed; which steps are done, and which are lost
    |-- UnsupportedModelError     a model that would compute wrong answers on paged memory: layer, reason, remedy
    |-- RequestError              a request that cannot be served: empty, too long, contradictory, not implemented
    |-- QueueFullError            the waiting queue is full: submit again later
    |-- NoEngineError             no engine of a router can take a request: all are down, draining, or have refused it
    |-- EngineError               the engine failed in a step, was closed, or is used in two ways at once
    |   `-- RankLostError         another process of the same model has ended, and the engine with it
    |-- RecordingError            a running engine that cannot be recorded: source, reason, remedy
    |-- TraceError                a trace file that cannot be read: file, line, reason, remedy
    |   `-- NoBlocksError         no prompt of a trace fills a block
    |-- OutputError               an output file of a command that cannot be written
    `-- InterruptedRunError       Ctrl-C or SIGTERM ended a command's run
"""

__all__ = [
    "BlockError",
    "ConfigurationError",
    "DeviceLostError",
    "DeviceUnavailableError",
    "EngineError",
    "FreedSequenceError",
    "InterruptedRunError",
    "InterruptedSpaceError",
    "LostSequenceError",
    "MissingExtraError",
    "NoBlocksError",
    "NoEngineError",
    "NoHostPoolError",
    "OutOfBlocksError",
    "OutputError",
    "PagedKVError",
    "PlanError",
    "QueueFullError",
    "RankLostError",
    "RecordingError",
    "RequestError",
    "SamplingError",
    "SequenceError",
    "SharedPrefixError",
    "StepError",
    "StorageError",
    "SwappedOutError",
    "TensorError",
    "TokenError",
    "TooManySequencesError",
    "TraceError",
    "TruncationError",
    "UnknownSequenceError",
    "UnsupportedModelError",
]


class PagedKVError(Exception):
    """Base of all errors raised by pagedkv."""


class ConfigurationError(PagedKVError, ValueError):
    """A size, a fraction or a combination of settings that cannot work."""


class TokenError(PagedKVError, ValueError):
    """Token ids that cannot be stored: none at all, outside int32, wrong shape or type."""


class OutOfBlocksError(PagedKVError):
    """Too few blocks are free: a classic action without the check before it, or what a shortage does not have."""


class TooManySequencesError(PagedKVError):
    """More sequences at once than the tables have rows."""


class SequenceError(PagedKVError):
    """The sequence (or row) is not in a state that allows the operation."""


class UnknownSequenceError(SequenceError, LookupError):
    """This sequence was never allocated here."""


class FreedSequenceError(SequenceError, LookupError):
    """This sequence has been freed: a double free or a use after free."""


class SwappedOutError(SequenceError):
    """The blocks of this sequence are in the host pool; swap it in first."""


class LostSequenceError(SequenceError):
    """An aborted step left this sequence's memory undefined; free it and allocate it again."""


class SharedPrefixError(PagedKVError):
    """Truncation would reach into blocks that another sequence or a ticket also refers to."""


class TruncationError(PagedKVError, ValueError):
    """The sequence cannot be rolled back to that length."""


class NoHostPoolError(PagedKVError):
    """Swapping was requested, but no host pool was configured."""


class BlockError(PagedKVError):
    """A block id outside the pool or not in use, or a block or ticket that is released twice."""


class StepError(PagedKVError):
    """Steps were not acknowledged in the order in which they were planned."""


class InterruptedSpaceError(PagedKVError):
    """An operation was interrupted midway, so the space's state is inconsistent: build a new space."""


class PlanError(PagedKVError, ValueError):
    """A buffer that cannot be read as a plan: cut short, corrupt, or of another version of the layout."""


class TensorError(PagedKVError, ValueError):
    """A tensor of the wrong type, shape or device, one that is not pinned, or one with slots outside the pool."""


class StorageError(PagedKVError):
    """Memory is released while copies are under way, or used while it is released."""


class SamplingError(PagedKVError):
    """A row cannot be sampled: no token is allowed, logits are NaN, or a custom processor returns a wrong result."""


class MissingExtraError(PagedKVError, ModuleNotFoundError):
    """A package of an extra of pagedkv is not installed, or too old; the message has pip's command."""


class DeviceUnavailableError(PagedKVError):
    """Triton or a GPU was requested on a machine that has none."""


class DeviceLostError(PagedKVError):
    """The device failed: its content is lost, and this process cannot use it any more.

    Args:
        done_steps: steps that the executor reported, or can report, as done; acknowledging them is right.
        lost_steps: steps that were launched, with an unknown outcome.
        reason: the device's own message.
    """

    def __init__(self, done_steps: tuple[int, ...], lost_steps: tuple[int, ...], reason: str) -> None:
        super().__init__(
            f"the device failed: {reason}. Steps {list(done_steps)} are done, steps {list(lost_steps)} are lost: abort "
            "them, and start the process again, since a failed device context cannot be used any more"
        )
        self.done_steps = done_steps
        self.lost_steps = lost_steps
        self.reason = reason


class UnsupportedModelError(PagedKVError):
    """A model that would compute wrong answers on paged memory; it is refused before the first answer."""


class RequestError(PagedKVError, ValueError):
    """A request that cannot be served. Other requests are not affected."""


class QueueFullError(PagedKVError):
    """The waiting queue is full, and the request was submitted without waiting for room; it may be served later."""


class NoEngineError(PagedKVError):
    """No engine of a router can take a request now: all are down, draining, or have refused it."""


class EngineError(PagedKVError, RuntimeError):
    """The engine cannot go on: a step failed, it was closed, or another caller drives it."""


class RankLostError(EngineError):
    """Another process that one model is shared out to has ended or does not answer; no rank can go on."""


class RecordingError(PagedKVError):
    """The events or metrics of a running engine cannot be recorded.

    Args:
        source: the endpoint or address, and which message of it.
        reason: what is wrong, with the offending value.
        remedy: what the user can do.
    """

    def __init__(self, source: str, reason: str, remedy: str) -> None:
        super().__init__(f"{source}: {reason}. {remedy}")
        self.source = source
        self.reason = reason
        self.remedy = remedy


class TraceError(PagedKVError):
    """A trace that cannot be read.

    Args:
        path: the file.
        line: 1-based line number, or None when the file as a whole is at fault.
        reason: what is wrong, with the offending value.
        remedy: what the user can do.
    """

    def __init__(self, path: str, line: int | None, reason: str, remedy: str) -> None:
        where = path if line is None else f"{path}:{line}"
        super().__init__(f"{where}: {reason}. {remedy}")
        self.path = path
        self.line = line
        self.reason = reason
        self.remedy = remedy


class NoBlocksError(TraceError):
    """No prompt of a trace fills a block, so there is nothing that a cache could hold."""


class OutputError(PagedKVError):
    """A requested output file cannot be written."""


class InterruptedRunError(PagedKVError):
    """Ctrl-C or SIGTERM ended a run; the message has its progress."""
