"""A calibrated test of Q = Q^π with the kernel Bellman loss, its power, and where the equation fails."""

from koffline.ope.bellman_test.front import bellman_test, witness_function
from koffline.ope.bellman_test.result import BellmanTest, TestedRows
from koffline.ope.bellman_test.settings import BellmanSettings
from koffline.ope.bellman_test.witness import Region, Witness, WitnessMap, WitnessValues

__all__ = [
    "BellmanSettings",
    "BellmanTest",
    "Region",
    "TestedRows",
    "Witness",
    "WitnessMap",
    "WitnessValues",
    "bellman_test",
    "witness_function",
]
