"""Tiers of a simulation: the production store core, on media with a bandwidth and a latency, on the virtual clock.

::

    simulated_tiers  SimulatedTier: size and speed; a store core and its medium; SimulatedTiers, which the clock calls

Which entries are loaded, computed and offered is decided by :mod:`pagedkv.tiers`, as in an engine.
"""

from pagedkv.simulation.tiers.simulated_tiers import SimulatedTier, SimulatedTiers, tier_figures

__all__ = ["SimulatedTier", "SimulatedTiers", "tier_figures"]
