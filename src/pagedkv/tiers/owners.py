"""Owners: the salt of each entry, and the bytes of each salt, of which a store may have a share at most.

Content is charged to its salt from before its write until it leaves the index. The salt of what a scan found is unknown
until it is offered: the key covers the salt, so an entry belongs to one. Content without a salt has no cap.
"""

from dataclasses import dataclass
from typing import Final, final

import numpy as np

from pagedkv.contract.arrays import Int32Array
from pagedkv.tiers.config import StoreConfig

__all__ = ["NO_OWNER", "Owners"]

NO_OWNER: Final = 0
WHOLE: Final = 1.0


@dataclass(slots=True)
class Account:
    """The entries of one salt, and its number in the array of owners."""

    salt: bytes
    number: int
    num_entries: int = 0
    nbytes: int = 0


@final
class Owners:
    """Bytes by salt. Without a share below 1 nothing is counted, and it takes no memory.

    Args:
        config: the cap, the share, and the number of entries, each of which takes 4 bytes here.
    """

    def __init__(self, config: StoreConfig) -> None:
        self.is_counting = config.salt_share < WHOLE
        self._cap_nbytes = config.cap_nbytes
        self._share_nbytes = int(config.salt_share * config.cap_nbytes)
        self._of_entry = np.zeros(config.max_entries + 1 if self.is_counting else 0, np.int32)
        self._accounts: dict[bytes, Account] = {}
        self._by_number: dict[int, Account] = {}
        self._next_number = NO_OWNER + 1

    @property
    def nbytes(self) -> int:
        """Bytes of the bookkeeping by entry."""
        return self._of_entry.nbytes

    @property
    def of_entry(self) -> Int32Array:
        """The owner of each entry: int32 ``[entries]``; ``NO_OWNER`` where it is unknown or there is no salt."""
        return self._of_entry

    def most_nbytes(self, salt: bytes) -> int:
        """Most bytes of a salt."""
        return self._share_nbytes if salt and self.is_counting else self._cap_nbytes

    def number_of(self, salt: bytes) -> int:
        """Return the number of a salt in :attr:`of_entry`; ``NO_OWNER`` if it has no content."""
        account = self._accounts.get(salt)
        return NO_OWNER if account is None else account.number

    def nbytes_of(self, salt: bytes) -> int:
        """Bytes that are charged to a salt."""
        account = self._accounts.get(salt)
        return 0 if account is None else account.nbytes

    def excess(self, salt: bytes, nbytes: int) -> int:
        """Return by how many bytes a salt would exceed its share with so many more; 0 if it would not."""
        if not salt or not self.is_counting:
            return 0
        return max(0, self.nbytes_of(salt) + nbytes - self._share_nbytes)

    def charge(self, entry: int, nbytes: int, salt: bytes) -> None:
        """Charge an entry without an owner to a salt."""
        if not salt or not self.is_counting:
            return
        account = self._accounts.get(salt)
        if account is None:
            account = self._accounts[salt] = self._by_number[self._next_number] = Account(salt, self._next_number)
            self._next_number += 1
        self._of_entry[entry] = account.number
        account.num_entries += 1
        account.nbytes += nbytes

    def claim(self, entries: Int32Array, sizes: Int32Array, salt: bytes) -> None:
        """Charge those of these entries to a salt whose owner is unknown. O(entries)."""
        if not salt or not self.is_counting:
            return
        is_unknown = self._of_entry[entries] == NO_OWNER
        for entry, nbytes in zip(entries[is_unknown].tolist(), sizes[is_unknown].tolist(), strict=True):
            self.charge(entry, nbytes, salt)

    def discharge(self, entry: int, nbytes: int) -> None:
        """End the charge of an entry that leaves the index; a salt without entries is forgotten."""
        number = int(self._of_entry[entry]) if self.is_counting else NO_OWNER
        if number == NO_OWNER:
            return
        self._of_entry[entry] = NO_OWNER
        account = self._by_number[number]
        account.num_entries -= 1
        account.nbytes -= nbytes
        if not account.num_entries:
            del self._by_number[number], self._accounts[account.salt]

    def check(self, sizes: Int32Array) -> None:
        """Check the bytes of each salt by the sizes of all entries. Raises AssertionError. O(entries x salts)."""
        if not self.is_counting:
            return
        for number, account in self._by_number.items():
            is_own = self._of_entry == number
            counted = (int(is_own.sum()), int(sizes[is_own].astype(np.int64).sum()))
            assert counted == (account.num_entries, account.nbytes), (
                f"entries and bytes of a salt: {counted}, {account}"
            )
        owned = sum(account.num_entries for account in self._by_number.values())
        assert owned == np.count_nonzero(self._of_entry), "an entry has an owner without an account"
