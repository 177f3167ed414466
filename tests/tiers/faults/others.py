"""Another process at the disk of the fault machine, and scans by which the store finds what it does, in pieces.

The other process obeys the cap, as at a shared folder. Between two pieces of a scan anything else happens. A listing
fails, or leaves out an entry that is there.
"""

from dataclasses import dataclass, field
from random import Random
from typing import Final

from pagedkv.tiers.core import StoreCore
from tests.tiers.faults.contents import Content, keys_of_names
from tests.tiers.faults.judge import Judge

LISTED: Final = 25
LOOKED_AT: Final = 11
ADOPTED: Final = 4


@dataclass(slots=True)
class Others:
    """The other process, and the open scan: keys whose places are still to be listed, and what was found."""

    rng: Random
    contents: dict[bytes, Content]
    judge: Judge
    fault_rate: float
    to_list: list[bytes] | None = None
    found: list[bytes] = field(default_factory=list)

    def restart(self) -> None:
        """Forget the scan of a process that has ended."""
        self.to_list, self.found = None, []
        self.judge.missing.clear()
        self.judge.others.clear()

    def store(self) -> None:
        """Store an entry, if the cap leaves room."""
        content = self.rng.choice(list(self.contents.values()))
        key, disk = content.run.key, self.judge.disk
        if key in disk.files or disk.nbytes + len(content.frame) > self.judge.cap_nbytes:
            return
        disk.change(key, content.frame)
        self.judge.touched.discard(key)
        self.judge.old.discard(key)
        self.judge.others.add(key)
        self.judge.are_owners_known = False
        self.judge.ledger.settle(key, "written over, unread")
        self.judge.seen["stored by another process"] += 1

    def delete(self) -> None:
        """Delete an entry."""
        files = self.judge.disk.files
        if files:
            key = self.rng.choice(list(files))
            self.judge.disk.change(key, None)
            self.judge.touch(key)
            self.judge.ledger.settle(key, "deleted by another process, unread")
            self.judge.seen["deleted by another process"] += 1

    def scan(self, core: StoreCore, now_s: float) -> bool:
        """Do the next piece of a scan; return whether the scan has ended with it."""
        if self.to_list is None:
            core.begin_scan()
            self.to_list, self.found = list(self.contents), []
            self.rng.shuffle(self.to_list)
            self.judge.missing.clear()
        elif self.rng.random() < self.fault_rate / 20:
            self.judge.ledger.happen("listing fails", "entries are left as they are")
            self._end(core, is_whole=False)
        elif self.to_list:
            self._list(core)
        elif core.lose_vanished(LOOKED_AT):
            pass
        elif self.found:
            piece, self.found = self.found[:ADOPTED], self.found[ADOPTED:]
            sizes = [len(self.judge.disk.files.get(key, self.contents[key].frame)) for key in piece]
            self.judge.seen["found by a scan"] += core.adopt(keys_of_names(piece), sizes, now_s)
        else:
            self._end(core, is_whole=True)
            return True
        return False

    def _list(self, core: StoreCore) -> None:
        assert self.to_list is not None
        piece, self.to_list = self.to_list[:LISTED], self.to_list[LISTED:]
        listed = [key for key in piece if key in self.judge.disk.files]
        if listed and self.rng.random() < self.fault_rate / 4:
            left_out = listed.pop(self.rng.randrange(len(listed)))
            is_known = left_out in self.judge.expected
            self.judge.failing.add(left_out)  # it may be written over
            self.judge.ledger.happen("listing leaves out an entry", "listed again later" if is_known else "not known")
        self.judge.missing |= set(piece) - set(listed)
        if listed:
            is_new = core.compare_scan(keys_of_names(listed)).tolist()
            self.found += [key for key, is_unknown in zip(listed, is_new, strict=True) if is_unknown]

    def _end(self, core: StoreCore, *, is_whole: bool) -> None:
        core.end_scan(is_whole=is_whole)
        self.to_list = None
        self.judge.seen["scans"] += is_whole
