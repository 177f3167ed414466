"""The parts of an engine, and what every one of its methods needs: its lock, its failure, and no step in flight."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from pagedkv.device import is_device_failure
from pagedkv.engine import compat
from pagedkv.engine.answering import Answering, Sampler
from pagedkv.engine.borrowing import BorrowedModel
from pagedkv.engine.config import EngineConfig
from pagedkv.engine.drafting import DraftModel
from pagedkv.engine.driving import Driver
from pagedkv.engine.engine_parts import EngineParts, ModelTraits, require_draft_model
from pagedkv.engine.grouping import EngineGroups
from pagedkv.engine.live_requests import LiveRequests
from pagedkv.engine.ranks import RankGroup, WholeModel
from pagedkv.engine.request_rules import RequestRules
from pagedkv.engine.sample import Decode
from pagedkv.engine.sampling import BatchSampler
from pagedkv.engine.step_loop import StepLoop
from pagedkv.engine.tiering import EngineTiers
from pagedkv.errors import DeviceLostError, EngineError, RankLostError
from pagedkv.scheduling import Request, Scheduler

__all__ = ["DrivenCore"]


class DrivenCore:
    """The parts of an :class:`~pagedkv.engine.core.EngineCore`, which documents arguments and attributes."""

    def __init__(
        self,
        model: compat.Model,
        groups: EngineGroups,
        config: EngineConfig,
        *,
        replays_steps: bool = False,
        continues: bool = True,
        decode: Decode | None = None,
        sampler: Sampler | None = None,
        clock: Callable[[], float] = perf_counter,
        ranks: RankGroup | None = None,
        whole: WholeModel | None = None,
        draft: DraftModel | None = None,
    ) -> None:
        require_draft_model(config, draft)
        self.config = config
        self._ranks = ranks
        self.driver = Driver()
        self._model, self._draft_model = model, None if draft is None else draft.model
        self._borrowed = BorrowedModel(*(each for each in (model, self._draft_model) if each is not None))
        self._parts = EngineParts(model, groups, config, ModelTraits(replays_steps, continues), ranks, draft)
        self.space, self.executor = self._parts.space, self._parts.executor
        self.memory, self.absorbed = self._parts.memory, self._parts.absorbed
        self._content = self._parts.content(whole)
        tiers = self._new_tiers()
        scheduling = config.scheduling(publishes_answers=not replays_steps)
        self.scheduler = Scheduler(scheduling, self.space, tiers)
        self.model_end_ids = compat.end_token_ids(model)
        limit = config.num_draft_states if groups.states else config.predicted_tokens
        self._num_predicted = min(limit, config.predicted_tokens)
        answering = Answering(BatchSampler(self.vocabulary_size) if sampler is None else sampler)
        self._rules = RequestRules(config, self.space, self.model_end_ids, self.vocabulary_size, decode)
        self._clock = clock
        self._live = LiveRequests(
            self.scheduler, self.space, self._rules, tiers=tiers, answering=answering, clock=clock
        )
        self.on_entered = self._live.on_entered
        self._loop = StepLoop(
            config, self._parts, self.scheduler, self._live, answering=answering, ranks=ranks, clock=clock
        )
        self._failure: str | None = None

    def _new_tiers(self) -> EngineTiers | None:
        if not self.config.tiers or self._content is None:
            return None
        return EngineTiers(self.config.tiers, self._content, self.space, self._note_loaded)

    def _note_loaded(self, scheduled: Request) -> None:
        self.scheduler.loaded(scheduled)

    @property
    def vocabulary_size(self) -> int:
        """Columns of the logits; all token ids are below it."""
        return self._parts.num_vocabulary

    def _land(self) -> None:
        """Finish the step in flight, if there is one. Raises EngineError, after which the engine cannot be used."""
        with self._at_stake():
            self._loop.finish_last()

    # Checks

    @contextmanager
    def _at_stake(self) -> Iterator[None]:
        """Make the engine unusable after an error that leaves a step half done.

        Raises EngineError: after any error; RankLostError is raised as it is.
        """
        try:
            yield
        except Exception as problem:
            self._failure = f"{type(problem).__name__}: {problem}"
            self._loop.abandon()
            if isinstance(problem, DeviceLostError) or is_device_failure(problem):
                self._live.end_all(self._failure)
            if isinstance(problem, RankLostError):
                raise
            if self._ranks is not None:
                self._ranks.require_all()  # the loss of a rank may be behind any other error
            raise EngineError(f"a step failed, and the engine is at its end: {self._failure}") from problem

    @contextmanager
    def _driving(self) -> Iterator[None]:
        """Hold the engine's lock. Raises EngineError where another thread holds it, or the engine has failed."""
        with self.driver.driving():
            if self._failure is not None:
                raise EngineError(f"the engine has failed before: {self._failure}. Build another one")
            yield
