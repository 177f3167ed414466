"""The methods of an engine on cached prefixes: dropping them, prefixes as files, hand-offs, and tiers."""

from pathlib import Path
from typing import Final

from pagedkv.contract.arguments import as_count, as_token_array, require_instance
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.events import TierEvents
from pagedkv.engine.driven_core import DrivenCore
from pagedkv.engine.intent import Intent
from pagedkv.engine.tiering import (
    EngineTiers,
    HandOff,
    LoadUnderWay,
    NixlLink,
    StoredContent,
    TierStatistics,
    hand_over_direct,
    read_prefix,
    take_over_direct,
    write_prefix,
)
from pagedkv.errors import ConfigurationError

__all__ = ["PrefixCore"]

NO_SHARED_TIER: Final = "a hand-off needs a tier that both engines have: a folder, Redis or an object store"


class PrefixCore(DrivenCore):
    """The part of an :class:`~pagedkv.engine.core.EngineCore` that takes prompts, and no requests."""

    def reset_prefix_cache(self) -> None:
        """Drop every cached block, so that later requests hit none. Requests under way keep their own blocks.

        Raises:
            EngineError: the engine has failed, or another thread drives it.

        Cost: O(blocks + rows).
        """
        with self._driving():
            self._land()
            self.space.reset_prefix_cache()
            if self._live.tiers is not None:
                self._live.tiers.reset()

    def forget(self, prompt_token_ids: Int32Array, *, salt: bytes = b"", start: int = 0) -> int:
        """Drop a prompt, and everything that continues it, from the prefix cache and from every tier.

        Requests under way are not affected. Tiers do not store the prompt again while this engine exists.

        Args:
            prompt_token_ids: int32 ``[n]``; salt: of the requests that computed it.
            start: first position to be dropped, with the whole block that contains it, and in a tier the whole run.

        Returns how many blocks left the prefix cache.

        Raises:
            EngineError: the engine has failed, or another thread drives it.

        Cost: O(blocks + blocks of all rows + entries of the tiers).
        """
        with self._driving():
            self._land()
            tokens = as_token_array(prompt_token_ids)
            keys = Intent(salt=salt).keys
            start = as_count(start, "start")
            if self._live.tiers is not None:
                self._live.tiers.forget(tokens, keys, start)
            return self.space.forget(tokens, keys=keys, start=start)

    # Prefixes as files

    def export(self, prompt_token_ids: Int32Array, path: str | Path, *, salt: bytes = b"") -> int:
        """Write the cached blocks of a prompt to a file for another process or machine, as frames with checksums.

        Args:
            prompt_token_ids: int32 ``[n]``; salt: of the requests that computed it.
            path: the file, which is written atomically.

        Returns the number of leading tokens in the file. 0: nothing is cached, and no file is written.

        Raises:
            EngineError: the engine has failed, or another thread drives it.
            OSError: the file cannot be written.
            MissingExtraError: xxhash is not installed.

        Cost: O(tokens), and the weights are read once.
        """
        with self._driving():
            self._land()
            tokens, keys = as_token_array(prompt_token_ids), Intent(salt=salt).keys
            return write_prefix(Path(path), self._file_content(), self.space, tokens, keys)

    def import_(self, path: str | Path, *, salt: bytes = b"") -> int:
        """Load a prefix from a file of :meth:`export` into the cache. The file must have been written with this salt.

        Returns the number of leading tokens loaded. 0: there are too few free blocks, and nothing is changed.

        Raises:
            ConfigurationError: the file is of another model, other weights or another layout, or is damaged; nothing is
                changed.
            EngineError: the engine has failed, or another thread drives it.
            OSError: the file cannot be read.
            MissingExtraError: xxhash is not installed.

        Cost: O(bytes), and the weights are read once.
        """
        with self._driving():
            self._land()
            return read_prefix(Path(path), self._file_content(), self.space, Intent(salt=salt).keys)

    def _file_content(self) -> StoredContent:
        if self._content is None:
            raise ConfigurationError(
                "an engine on several ranks has files of prefixes only at rank 0 and with `tiers`: configure a tier"
            )
        return self._content

    def hand_over(
        self,
        prompt_token_ids: Int32Array,
        *,
        salt: bytes = b"",
        timeout_s: float = 60.0,
        link: NixlLink | None = None,
    ) -> HandOff:
        """Store the computed blocks of a prompt in the shared tiers; return where they are, for another engine.

        Args:
            prompt_token_ids: int32 ``[n]``; salt: of the requests that computed it.
            timeout_s: longest time to wait for the stores; what is not stored by then is not in the hand-off. Neither
                is what the tiers do not admit.
            link: offers what is cached from memory to memory, without a tier; None: by the tiers.

        Raises:
            ConfigurationError: the engine has no tiers and there is no link, or the prompt is too large for the link.
            EngineError: the engine has failed, or another thread drives it.

        Cost: O(tokens + bytes that are not stored yet), and the weights are read once; with a link O(bytes).
        """
        with self._driving():
            self._land()
            tokens, keys = as_token_array(prompt_token_ids), Intent(salt=salt).keys
            if link is not None:
                return hand_over_direct(link, self._file_content(), self.space, tokens, keys)
            return self._shared_tiers().hand_over(tokens, keys, timeout_s)

    def take_over(
        self,
        hand_off: HandOff,
        prompt_token_ids: Int32Array,
        *,
        salt: bytes = b"",
        timeout_s: float = 60.0,
        link: NixlLink | None = None,
    ) -> int:
        """Take the blocks of a prompt over from another engine: later requests with this prompt load them.

        Args:
            hand_off: from :meth:`hand_over` of an engine with the same model and settings.
            prompt_token_ids: int32 ``[n]``, the same prompt; salt: the same salt; else nothing is listed.
            timeout_s: longest time to wait for a link.
            link: of a hand-off by a link, which brings the blocks into the cache at once; None: by the tiers.

        Returns the number of leading tokens that can be loaded, whose bytes are verified when they are loaded. With a
        link, the number of those in the cache; 0: nothing was cached there, or there are too few free blocks.

        Raises:
            ConfigurationError: the fingerprint differs, the prompt is another one, a tier or a link is missing here, or
                the other engine does not answer; nothing is changed.
            EngineError: the engine has failed, or another thread drives it.

        Cost: O(tokens), and the weights are read once; with a link O(bytes).
        """
        require_instance(hand_off, HandOff, "hand_off")
        if hand_off.direct is not None and link is None:
            raise ConfigurationError("the hand-off is in the memory of its engine: pass a link (NixlLink)")
        with self._driving():
            self._land()
            tokens, keys = as_token_array(prompt_token_ids), Intent(salt=salt).keys
            if link is not None:
                content = self._file_content()
                return take_over_direct(hand_off, link, timeout_s, content, self.space, tokens, keys)
            return self._shared_tiers().take_over(hand_off, tokens, keys)

    # Tiers

    def _shared_tiers(self) -> EngineTiers:
        if self._live.tiers is None:
            raise ConfigurationError(NO_SHARED_TIER)
        return self._live.tiers

    def tier_statistics(self) -> tuple[TierStatistics, ...]:
        """Take a snapshot of each tier of ``EngineConfig.tiers``."""
        return () if self._live.tiers is None else self._live.tiers.statistics()

    def tier_loads(self) -> tuple[LoadUnderWay, ...]:
        """Return the loads from tiers that are under way. O(loads)."""
        return () if self._live.tiers is None else self._live.tiers.loads()

    def drain_tier_events(self) -> tuple[TierEvents, ...]:
        """Take the events of entries of tiers since the last call, by medium; none unless ``EngineConfig.events``."""
        return () if self._live.tiers is None else self._live.tiers.drain_events()

    def tier_entries(self) -> tuple[TierEvents, ...]:
        """Return all entries of tiers whose events were drained, by medium. O(entries)."""
        return () if self._live.tiers is None else self._live.tiers.entries()

    def tier_weights(self) -> dict[str, float]:
        """Return by medium the measured part of the time of computing that loading saves, between 0 and 1."""
        return {} if self._live.tiers is None else self._live.tiers.weights()

    def flush_tiers(self, timeout_s: float = 60.0) -> bool:
        """Wait until all computed blocks are stored in the tiers that admit them; return whether they are.

        False: some that were computed since the last call are late, failed to be stored, or were dropped, as where a
        tier is full or out of service.

        Raises EngineError where another thread drives the engine.
        """
        with self.driver.driving():
            return self._live.tiers is None or self._live.tiers.flush(timeout_s)

    def close(self, timeout_s: float = 60.0) -> bool:
        """Flush and close the tiers; the engine goes on without them. Return what :meth:`flush_tiers` does.

        Not needed for correct answers, nor before the process ends: stores then have ten seconds to finish.

        Raises EngineError where another thread drives the engine.
        """
        with self.driver.driving():
            tiers, self._live.tiers = self._live.tiers, None
            is_stored = tiers is None or tiers.close(timeout_s)
            self.scheduler.end_loading()
            return is_stored
