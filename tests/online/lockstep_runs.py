"""Small stacks of runs that differ in everything that may differ, and all that can be
seen of them.
"""

import contextlib

import numpy as np

from koffline.online.config import CRITICS, OnlineConfig, OnlineRun
from koffline.online.lockstep import LockStep

SMALL = {
    "hidden": (6, 5),
    "batch_size": 4,
    "learning_starts": 5,
    "capacity": 12,
    "evaluation_episodes": 1,
}
ENVIRONMENTS = ["Pendulum-v1", "CartPole-v1"]


def make_runs(environment, count=6, **changes):
    """One run of each critic, each with settings of its own."""
    settings = [
        {
            "critic": CRITICS[k % 6],
            "window_length": (10, 3, 1, 5, 4, 2)[k % 6],
            "recency": (0.0, 0.1, 0.5, 0.01, 0.1, 0.2)[k % 6],
            "entropy_coef": 0.01 * k,
            "entropy_decay": 0.1,
            "learning_rate": 0.003 * (k + 1),
        }
        for k in range(count)
    ]
    configs = [
        OnlineConfig(environment, **{**SMALL, **setting, **changes})
        for setting in settings
    ]
    return [OnlineRun(config, seed=10 + k) for k, config in enumerate(configs)]


@contextlib.contextmanager
def playing(runs, **options):
    with contextlib.closing(LockStep(runs, **options)) as stack:
        yield stack


def iterate(stack, count):
    for _ in range(count):
        stack.iterate()
    return stack


def agent_arrays(agent):
    """Every number of an agent by name."""
    arrays = {
        name: np.asarray(getattr(agent, name))
        for name in ("mean", "std", "kl_coef", "entropy_coef")
    }
    for prefix, stack in (("", agent.online), ("target_", agent.target)):
        networks = {
            "policy": stack.policy.flat,
            "log_std": stack.log_std,
            "value": stack.value.flat,
        }
        arrays |= {prefix + name: part.numpy() for name, part in networks.items()}
    return arrays


def everything(stack):
    """What a user can see of every run; taking it twice would empty the metrics."""
    arrays = []
    evaluations = stack.evaluate()
    metrics = stack.take_metrics()
    for run in range(len(stack.runs)):
        held = vars(stack.replay.held(run))
        numbers = {
            **agent_arrays(stack.agent(run)),
            **{f"replay.{k}": v for k, v in held.items()},
        }
        numbers |= {f"evaluation.{k}": v[run] for k, v in evaluations.items()}
        numbers |= {f"metrics.{k}": v[run] for k, v in metrics.items()}
        arrays.append(numbers)
    return arrays


def check_same(left, right, **tolerance):
    """Equal to the bit, or within a tolerance."""
    assert left.keys() == right.keys()
    for name in left:
        if tolerance and left[name].dtype.kind == "f":
            np.testing.assert_allclose(
                left[name], right[name], err_msg=name, **tolerance
            )
        else:
            np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def forward(network, inputs):
    """The outputs of the only network of a stack, by their definition."""
    *below, (top, bias) = [
        (w[0].numpy(), b[0, 0].numpy()) for w, b in network.layers(network.flat)
    ]
    for weight, shift in below:
        inputs = np.tanh(inputs @ weight + shift)
    return inputs @ top + bias
