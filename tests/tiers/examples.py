"""Identities, runs and parts that tests of tiers share."""

import hashlib
from dataclasses import replace
from typing import Final

from pagedkv.contract.keys import MediaSpan, RequestKeys
from pagedkv.tiers.identity import GroupLayout, Identity, ModelIdentity, Run, runs_of

GROUPS: Final = (
    GroupLayout("full", 4, "float16", "NHC", (4, 2, 4), (8, 4, 1)),
    GroupLayout("window", 4, "float8_e4m3fn", "NC", (4, 5), (5, 1), (0.5, 2.0)),
)
MODEL: Final = ModelIdentity("toy", bytes(range(32)), (("tuned", bytes(range(16))),), (("rope", "1"),))
IDENTITY: Final = Identity(GROUPS, MODEL)
SALTED: Final = RequestKeys("tuned", "2", b"secret of a tenant", (MediaSpan(5, 2, b"picture"),))
SECRET: Final = bytes(range(100, 132))


def some_runs(num_runs: int = 3, keys: RequestKeys = SALTED, seed: int = 0) -> list[Run]:
    """Cut runs of two blocks from a prompt."""
    return runs_of([seed * 1000 + token - 1 for token in range(8 * num_runs)], 4, 2, keys)


def parts_of(run: Run) -> tuple[bytes, bytes]:
    """Make the parts of a run, from its key: two blocks of the full group, one of the window."""
    content = hashlib.shake_256(run.key).digest(2 * 64 + 20)
    return content[: 2 * 64], content[2 * 64 :]


def other_identities() -> dict[str, Identity]:
    """Make identities that differ in one thing each, by the reason of the refusal and that thing."""
    full, window = GROUPS
    layouts = {
        "letters": replace(full, letters="NCH"),
        "strides": replace(full, strides=(8, 1, 2)),
        "dtype": replace(full, dtype="bfloat16"),
        "block_size": replace(full, block_size=8),
        "name": replace(full, name="whole"),
    }
    others = {f"layout {name}": Identity((layout, window), MODEL) for name, layout in layouts.items()}
    others["layout scales"] = Identity((full, replace(window, scales=(0.5, 4.0))), MODEL)
    others["layout groups"] = Identity((full,), MODEL)
    models = {
        "weights": replace(MODEL, weights=bytes(32)),
        "adapters": replace(MODEL, adapters=()),
        "versions": replace(MODEL, versions=(("rope", "2"),)),
        "name": replace(MODEL, name="other"),
    }
    return others | {f"model {name}": Identity(GROUPS, model) for name, model in models.items()}
