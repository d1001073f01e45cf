# %% [markdown]
# # A d3rlpy user's day
#
# Train with d3rlpy as always, on koffline's buffer; train a kernel-loss critic beside it; ask what both are worth without
# an environment; test the value function of an FQE. Budgets are tiny here, so that the page is made in seconds.

# %%
import logging
import tempfile
from pathlib import Path

import d3rlpy
import structlog

import koffline
import koffline.algos

warnings_only = structlog.make_filtering_bound_logger(logging.WARNING)
structlog.configure(wrapper_class=warnings_only)  # d3rlpy's own notes
folder = Path(tempfile.mkdtemp())
quiet = {
    "show_progress": False,
    "logger_adapter": d3rlpy.logging.NoopAdapterFactory(),
}

# %% [markdown]
# ## The buffer
#
# `open_transitions` reads d3rlpy's dumps, D4RL, Minari, tables. `ColumnarReplayBuffer` is a d3rlpy `ReplayBuffer` to every
# algorithm, and draws mini-batches some forty times faster.

# %%
log = koffline.open_transitions("datasets/control/cartpole_replay.hdf5")
buffer = koffline.ColumnarReplayBuffer(log)
print(log)

# %% [markdown]
# ## Two algorithms
#
# d3rlpy's DiscreteCQL, and ours: the same API, no target network in the critic.

# %%
stock = d3rlpy.algos.DiscreteCQLConfig(
    gamma=0.98, learning_rate=1e-3, batch_size=256
).create()
stock.fit(buffer, n_steps=300, n_steps_per_epoch=300, **quiet)
ours = koffline.algos.KLossDiscreteCQLConfig(gamma=0.98).create()
history = ours.fit(buffer, n_steps=300, n_steps_per_epoch=300, **quiet)

# %% [markdown]
# ## Which one is better?
#
# No environment is needed. A trained algorithm is a policy, in memory or as a `.d3` file.

# %%
stock.save(str(folder / "stock.d3"))
ours.save(str(folder / "ours.d3"))
ranking = koffline.select_policies(
    log,
    {"stock": folder / "stock.d3", "ours": ours},
    gamma=0.98,
    steps=300,
    resampled_replicas=4,
)
print(ranking)

# %% [markdown]
# The log says it before anything is deployed: values with intervals, and which differences are more than chance.
#
# ## Is this FQE right?
#
# FQE gives a value function. `diagnose` tests it on rows that it was not trained on, and shows where it is wrong.

# %%
half = log.n_episodes // 2
first, second = (
    log.select_episodes(range(half)),
    log.select_episodes(range(half, log.n_episodes)),
)
fqe = d3rlpy.ope.DiscreteFQE(
    algo=ours, config=d3rlpy.ope.FQEConfig(gamma=0.98, learning_rate=1e-3)
)
fqe.fit(
    koffline.ColumnarReplayBuffer(first),
    n_steps=200,
    n_steps_per_epoch=200,
    **quiet,
)
print(koffline.diagnose(fqe, second, ours, 0.98, trained_on=first))

# %% [markdown]
# After 200 steps it is far off, and the places of the largest error are listed.
#
# ## Loading safely
#
# `koffline.load` gives back any `.d3`, d3rlpy's or ours, without running code in the file; d3rlpy's own `load_learnable`
# unpickles it.

# %%
again = koffline.load(folder / "stock.d3")
print(
    type(again).__name__,
    (
        again.predict(log.observations[:5]) == stock.predict(log.observations[:5])
    ).all(),
)

# %% [markdown]
# The same from the command line, with resumable runs:
#
# ```sh
# koffline train kloss_discrete_cql --out runs/ours
# koffline select datasets/control/cartpole_replay.hdf5 --policies runs/ours/model_10000.d3 stock.d3 --gamma 0.98
# ```
