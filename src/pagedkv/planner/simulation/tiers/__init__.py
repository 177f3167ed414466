"""Tiers of a simulation: the store core that serves, on media with a bandwidth and a latency, on the virtual clock.

::

    config           SimulatedTier: size and speed of a tier, and its rules
    medium           how long its actions take
    virtual_store    a store core and its medium
    no_bytes         copies of blocks without content
    simulated_tiers  SimulatedTiers: what the clock calls
    tier_figures     what is measured of them

Which entries are loaded, computed and offered is decided by :mod:`pagedkv.memory.tiering`, as in an engine.
"""

from pagedkv.planner.simulation.tiers.config import SimulatedTier
from pagedkv.planner.simulation.tiers.simulated_tiers import SimulatedTiers
from pagedkv.planner.simulation.tiers.tier_figures import tier_figures

__all__ = ["SimulatedTier", "SimulatedTiers", "tier_figures"]
