"""Tiers of a simulation: the production store core, on media with a bandwidth and a latency, on the virtual clock.

::

    config           SimulatedTier: size and speed of a tier, and its rules
    medium           durations of reads and writes
    virtual_store    a store core and its medium
    no_bytes         copies of blocks without content
    simulated_tiers  SimulatedTiers: the methods that the clock calls
    tier_figures     their figures

Which entries are loaded, computed and offered is decided by :mod:`pagedkv.tiers`, as in an engine.
"""

from pagedkv.simulation.tiers.config import SimulatedTier
from pagedkv.simulation.tiers.simulated_tiers import SimulatedTiers
from pagedkv.simulation.tiers.tier_figures import tier_figures

__all__ = ["SimulatedTier", "SimulatedTiers", "tier_figures"]
