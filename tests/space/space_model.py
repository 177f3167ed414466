"""What a block space must answer and hold: live sequences, their exact block counts, and steps in flight.

Predicts, in dicts and lists, whether an operation succeeds and how many blocks it takes; then reads the
space's tables and compares. One module an operation; :mod:`tests.space.live_model` holds what they share.
"""

from tests.space.declared_model import DeclaredModel
from tests.space.growth_model import GrowthModel
from tests.space.load_model import LoadModel
from tests.space.swap_model import SwapModel

__all__ = ["SpaceModel"]


class SpaceModel(GrowthModel, SwapModel, DeclaredModel, LoadModel):
    """The expected state of one block space, and what each operation must do to it."""
