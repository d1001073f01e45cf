# %% [markdown]
# # The paper in an hour
#
# Feng, Li & Liu, *A Kernel Loss for Solving the Bellman Equation* (2019), in small. Four facts, each a few lines. The full
# figures are one command each (`koffline reproduce figure-puddle`); this page takes seconds.
#
# ## 1. The loss
#
# Residuals of single samples, δ = r + γV(s′) − V(s), are noisy: their square is an error plus a noise. The kernel loss
# multiplies residuals of *different* rows, so the noise averages out. At the true values it is about zero; the squared
# residual is not.

# %%
import torch
from koffline.kernel_loss import u_statistic
from koffline.kernels import Gaussian

generator = torch.Generator().manual_seed(0)
states = torch.rand(2000, 1, generator=generator, dtype=torch.float64)
rewards = torch.sin(6 * states[:, 0]) + torch.randn(
    2000, generator=generator, dtype=torch.float64
)
true_values = torch.sin(6 * states[:, 0])  # γ = 0: mean rewards
gram = Gaussian(0.2).gram(states)
for name, values in {
    "true values": true_values,
    "a constant": torch.zeros(2000),
}.items():
    residual = rewards - values
    loss, square = u_statistic(residual, gram), residual.square().mean()
    print(f"{name}: kernel loss {loss:.4f}, squared residual {square:.3f}")

# %% [markdown]
# ## 2. TD diverges, the loss does not
#
# The chain of Tsitsiklis and Van Roy has four states and three weights. Off-policy, TD(0) and fitted value iteration blow
# up on it. The kernel loss is an ordinary objective, and gradient descent on it lands on the LSTD solution.

# %%
import tempfile
from pathlib import Path

from koffline.experiments.cells import Run, Scale
from koffline.experiments.reproduce import reproduce

folder = Path(tempfile.mkdtemp())
run = Run(
    "figure-toy",
    folder,
    Scale(quick=True),
    command="koffline reproduce figure-toy --quick",
)
reproduce(run)
print((folder / "figure-toy.md").read_text())

# %% [markdown]
# The full run, with ten seeds:
#
# ![Errors of six methods on the chain](../reproduce/figure-toy.png)
#
# ## 3. Noise is what hurts the residual gradient
#
# RG minimises the squared residual, noise included. Walk on a ring of 20 states that pays 1 in state 0, with a weight for
# every state, so that both losses can be minimised exactly. Where a step is certain both find the values. Where it goes left
# or right by chance, RG prefers values that make the noise small, and flattens them.

# %%
states = torch.arange(20).repeat(100)
one_hot, reward = torch.eye(20, dtype=torch.float64), (states == 0).double()
gram = Gaussian(0.05).gram(
    torch.stack(
        [torch.sin(states / 3.1831), torch.cos(states / 3.1831)], dim=1
    ).double()
)
for name in ("certain", "by chance"):
    left = (
        torch.randint(2, states.shape, generator=generator)
        if name == "by chance"
        else torch.zeros_like(states)
    )
    following = (states + 1 - 2 * left) % 20
    change = one_hot[states] - 0.9 * one_hot[following]
    moves = torch.stack(
        [one_hot[following[states == state]].mean(dim=0) for state in range(20)]
    )
    true_values = torch.linalg.solve(one_hot - 0.9 * moves, one_hot[0])
    fits = {
        "RG": torch.linalg.lstsq(change, reward[:, None]).solution[:, 0],
        "K-loss": torch.linalg.solve(
            change.T @ gram @ change, change.T @ gram @ reward
        ),
    }
    for method, values in fits.items():
        error = (values - true_values).square().mean() / true_values.var()
        print(f"steps {name}, {method}: error {error:.3f} (1: the best constant)")

# %% [markdown]
# ## 4. The last layer has a closed form
#
# The loss is quadratic in weights that enter linearly, so Adam is not needed for them. The estimator `mql` minimises it
# exactly over Q linear in random features. `koffline evaluate` does the same with the last layers of its networks.

# %%
import koffline

log = koffline.open_transitions("datasets/cartpole.hdf5")
estimate = koffline.evaluate(
    log,
    "datasets/cartpole_policy.npz",
    gamma=0.98,
    estimator="mql",
    feature_source="random",
)
print(estimate)

# %% [markdown]
# Which of the paper's sentences hold, and which do not, with intervals: [the claims](../reproduce/claims.html).
