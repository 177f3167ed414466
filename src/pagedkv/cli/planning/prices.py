"""The cost of tokens, by prices that the user types, in any currency; no prices are downloaded.

The cost is the number of a setting's GPUs times the price of one for an hour, divided by the tokens of good answers
that it sustains in an hour. Without a sustained load there is no cost.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pagedkv.cli.sizes import parse_gpu
from pagedkv.errors import ConfigurationError
from pagedkv.simulation.cost import find_gpu
from pagedkv.simulation.planning import Steadiness

__all__ = ["TokenCost", "parse_prices", "token_cost"]

SECONDS_AN_HOUR: Final = 3600.0
MILLION: Final = 1e6
HIGHEST_PRICE: Final = 1e9


@dataclass(frozen=True, slots=True)
class TokenCost:
    """The cost of a setting under the highest load that it holds.

    Args:
        an_hour: cost of all its GPUs.
        a_million_output_tokens: cost of tokens generated in good answers; None if there are none.
        a_million_tokens: cost of tokens, counting the prompts of good answers as well.
    """

    an_hour: float
    a_million_output_tokens: float | None
    a_million_tokens: float | None

    def as_dict(self) -> dict[str, float | None]:
        """Return the costs for JSON."""
        return {
            "an_hour": self.an_hour,
            "a_million_output_tokens": self.a_million_output_tokens,
            "a_million_tokens": self.a_million_tokens,
        }


def parse_prices(text: str) -> dict[str, float]:
    """Parse prices of GPUs for an hour.

    Raises:
        ConfigurationError: a price is invalid, or a GPU is unknown or named twice.

    >>> parse_prices("h100=2.5,H200=3")
    {'h100': 2.5, 'h200': 3.0}
    """
    prices: dict[str, float] = {}
    for part in text.split(","):
        name, equals, number = (each.strip() for each in part.partition("="))
        price = _number(number)
        if not equals or price is None or not 0 < price <= HIGHEST_PRICE:
            raise ConfigurationError(
                f"--price must be the price of a GPU for an hour, as in h100=2.5,l4=0.7, got {part!r:.60}"
            )
        find_gpu(name)
        if name.lower() in prices:
            raise ConfigurationError(f"--price names {name} twice: {text!r:.60}")
        prices[name.lower()] = price
    return prices


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def token_cost(gpus: str, prices: Mapping[str, float], steady: Steadiness) -> TokenCost | None:
    """Compute the cost of tokens on some GPUs; None without a price for them.

    Args:
        gpus: as typed, ``8xh100``.
        prices: result of :func:`parse_prices`.
        steady: steadiness of a load that holds.
    """
    number, name = parse_gpu(gpus)
    price = prices.get(name.lower())
    if price is None:
        return None
    an_hour = number * price
    hours = steady.measured_s / SECONDS_AN_HOUR
    outputs = steady.num_good_output_tokens
    return TokenCost(
        an_hour,
        _a_million(an_hour * hours, outputs),
        _a_million(an_hour * hours, outputs + steady.num_good_prompt_tokens),
    )


def _a_million(cost: float, num_tokens: int) -> float | None:
    return cost / num_tokens * MILLION if num_tokens else None
