"""The measured rate of computing tokens, which a load has to beat."""

from typing import Final, final

__all__ = ["ComputeRate"]

KEEPS: Final = 0.9
"""Weight of the past at each new step."""
FEWEST_TOKENS: Final = 8
"""A step with fewer prompt tokens takes as long as a step without, so its time is no measure of them."""


@final
class ComputeRate:
    """Seconds a token of a prompt, from the steps so far, the latest weighing most."""

    def __init__(self) -> None:
        self._num_tokens = 0.0
        self._seconds = 0.0

    def note(self, num_prefilled: int, num_tokens: int, seconds: float) -> None:
        """Note a step.

        Args:
            num_prefilled: tokens of prompts that it computed; num_tokens: all that it computed.
            seconds: how long it took.
        """
        if num_prefilled >= FEWEST_TOKENS:
            self._num_tokens = KEEPS * self._num_tokens + num_prefilled
            self._seconds = KEEPS * self._seconds + seconds * num_prefilled / num_tokens

    def predict_s(self, num_tokens: int) -> float | None:
        """Predict the seconds to compute so many tokens; None before the first step with a prompt."""
        return num_tokens * self._seconds / self._num_tokens if self._num_tokens else None
