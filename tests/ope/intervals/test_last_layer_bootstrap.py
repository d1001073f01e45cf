"""The bootstrap of fitted networks' last layers: the equation they solve, and the interval."""

import pytest
import torch

from koffline.config import make_settings
from koffline.ope.ensemble import draw_ensemble
from koffline.ope.fitted import FittedValues, fit_value_functions
from koffline.ope.intervals.last_layer import last_layer_bootstrap, network_equation
from tests.exact_problems import EXACT_PROBLEMS
from tests.ope.intervals.systems import prepared


def _fit(name: str, full: int = 2, rows: int = 600) -> FittedValues:
    exact = EXACT_PROBLEMS[name](3, rows)
    problem = prepared(exact)
    settings = make_settings(
        {
            "gamma": exact.gamma,
            "steps": 200,
            "hidden_units": (16, 16),
            "instruments": 200,
            "full_replicas": full,
            "resampled_replicas": 2,
        },
        {},
    )
    with torch.no_grad():
        ensemble = draw_ensemble(problem, full, 2, 0)
        return fit_value_functions(problem, ensemble, settings)


@pytest.fixture(scope="module")
def chain() -> FittedValues:
    return _fit("chain_off")


@pytest.mark.parametrize("head", ["kloss", "lstd"])
def test_the_head_solves_its_equation(chain: FittedValues, head: str) -> None:
    """Without the ridge's pull the mean of Ωδ̂ would be zero; it is τ(θ̂ − θ_trained)."""
    from koffline.solvers.linear import last_layer

    equation = network_equation(chain, 1, head)
    gap = (equation.instruments * equation.residuals[:, None]).mean(dim=0)
    trained = last_layer(chain.record.network.select([1]))[0]
    # the table is float32: its last bit times the size of the products
    assert torch.allclose(gap, equation.ridge * (equation.theta - trained), atol=1e-6)
    value = float(equation.start_weights @ (equation.starts @ equation.theta))
    value *= chain.problem.reward_scale / float(equation.start_weights.sum())
    assert value == pytest.approx(chain.replica_values[head][1], rel=1e-4)


@pytest.mark.parametrize("head", ["kloss", "fqe", "lstd"])
def test_interval_around_the_estimate(chain: FittedValues, head: str) -> None:
    interval = last_layer_bootstrap(chain, draws=200, seed=1, head=head)
    value = float(chain.replica_values[head][:2].mean())
    assert interval.low < value < interval.high
    assert interval.kind == "bootstrap-pivot"
    assert "last layers" in interval.assumptions
    assert ("kernel loss" in interval.assumptions) == (head == "kloss")
    assert last_layer_bootstrap(chain, draws=200, seed=1, head=head) == interval
    wide = last_layer_bootstrap(chain, draws=200, seed=1, head=head, level=0.99)
    assert wide.width > interval.width
