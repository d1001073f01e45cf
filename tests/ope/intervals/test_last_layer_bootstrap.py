"""The bootstrap of fitted networks' last layers: the equation they solve."""

import pytest
import torch

from koffline.config import make_settings
from koffline.ope.fitted import FittedValues, fit_value_functions
from koffline.ope.intervals.last_layer import network_equation
from koffline.ope.learning import draw_ensemble
from tests.exact_problems import EXACT_PROBLEMS
from tests.ope.intervals.systems import prepared


@pytest.fixture(scope="module")
def chain() -> FittedValues:
    exact = EXACT_PROBLEMS["chain_off"](3, 600)
    problem = prepared(exact)
    chosen = {"steps": 200, "hidden_units": (16, 16), "instruments": 200, "full_replicas": 2}
    settings = make_settings({"gamma": exact.gamma, **chosen, "resampled_replicas": 2}, {})
    with torch.no_grad():
        return fit_value_functions(problem, draw_ensemble(problem, 2, 2, 0), settings)


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
