import pytest
import torch

from koffline.errors import ConfigError
from koffline.kernels import Gaussian, Linear
from koffline.objectives import (
    CopyTarget,
    FittedIteration,
    FollowTarget,
    KernelLoss,
    ResidualGradient,
    TemporalDifference,
    fitted_q,
)
from tests.engine_problems import reference_loss

OBJECTIVES = [
    KernelLoss(Gaussian(0.7)),
    KernelLoss(Gaussian(0.7), diag_weight=0.0),
    KernelLoss(Linear(), diag_weight=0.3),
    ResidualGradient(),
    TemporalDifference(),
    FittedIteration(),
]


def rows(replicas=3, count=6):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    discount = torch.rand(replicas, count, generator=generator, dtype=torch.float64)
    return draw(replicas, count), discount, draw(replicas, count), draw(replicas, count), draw(count, 2)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
@pytest.mark.parametrize("own_grams", [False, True])
def test_closed_form_gradients_are_autograds(objective, own_grams):
    reward, discount, value, next_value, x = rows()
    gram = None
    if objective.kernel is not None:
        gram = objective.kernel.gram(x)
        if own_grams:
            gram = torch.stack([gram * factor for factor in (1.0, 0.5, 2.0)])
    value.requires_grad_(), next_value.requires_grad_()
    loss = reference_loss(objective, reward, discount, value, next_value, gram)
    slopes = torch.autograd.grad(loss.sum(), (value, next_value), allow_unused=True)
    residual = (reward + discount * next_value - value).detach()
    found = objective.compute_gradients(residual, discount, gram)
    torch.testing.assert_close(found.loss, loss.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found.value, slopes[0], rtol=1e-12, atol=1e-14)
    if objective.next_from == "network":
        torch.testing.assert_close(found.next_value, slopes[1], rtol=1e-12, atol=1e-14)
    else:
        assert found.next_value is None


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="diag_weight is 2"):
        KernelLoss(Linear(), 2.0)
    with pytest.raises(ConfigError, match="target rate is 0"):
        FollowTarget(0.0)
    with pytest.raises(ConfigError, match="copy interval is 0"):
        CopyTarget(0)
    with pytest.raises(ConfigError, match="next_bounds is"):
        fitted_q(0.1, (1.0, -1.0))
