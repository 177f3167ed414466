"""Numbers the tenants of a trace (customers, teams, or several logs) in the order in which they appear."""

from typing import Final

__all__ = ["NO_TENANT", "Tenants"]

NO_TENANT: Final = "(none)"
"""The name for requests without a tenant, where other requests have one."""


class Tenants:
    """Numbers tenants.

    >>> tenants = Tenants()
    >>> [tenants.number(name) for name in ("b", None, "a", "b")], tenants.names, tenants.are_known
    ([0, 1, 2, 0], ['b', '(none)', 'a'], True)
    """

    def __init__(self) -> None:
        self._numbers: dict[str | None, int] = {}

    def number(self, tenant: str | None) -> int:
        """Return the number of a tenant; a new tenant gets the next number."""
        return self._numbers.setdefault(tenant, len(self._numbers))

    @property
    def names(self) -> list[str]:
        """The names, by number."""
        return [NO_TENANT if name is None else name for name in self._numbers]

    @property
    def are_known(self) -> bool:
        """Whether any request had a tenant."""
        return bool(self._numbers.keys() - {None})
