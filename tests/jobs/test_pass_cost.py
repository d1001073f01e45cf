"""The cost model of docs/many_machines.md counts what the pass does."""

import pytest

from scripts.bench.pass_cost import Sizes, cost, flops_per_row, measure


@pytest.mark.slow
def test_formulas_are_what_the_pass_does() -> None:
    measured = measure(4_000, 5, repeats=1)
    assert measured["flops_per_row"] == pytest.approx(measured["flops_counted"], rel=0.02)  # and its starts
    assert measured["record_bytes_formula"] == pytest.approx(measured["record_bytes"], rel=0.001)


def test_costs_by_hand() -> None:
    sizes = Sizes(inputs=2, kernel_inputs=2, hidden=(3,), replicas=1, instruments=10)  # p = 4
    assert flops_per_row(sizes) == {
        "instruments": 20,
        "networks": 24,
        "projected": 100,
        "temporal": 40,
        "squares": 50,
    }
    measured = {"bytes_per_row": 100, "flops_per_row": 1e6, "microseconds_per_row": 16.0, "record_bytes": 1e8}
    found = cost(1e9, 10, measured)
    assert (found.terabytes, found.petaflops, found.seconds_computing) == (0.1, 1.0, 100.0)
    assert (found.seconds_reading, found.gigabytes_of_sums, found.seconds_of_sums) == (10.0, 25.6, 20.48)
