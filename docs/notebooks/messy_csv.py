# %% [markdown]
# # From a messy CSV to a decision
#
# Every week a shop sends each customer nothing, a mail, or a mail with a voucher. The log is a messy CSV:
# rows in no order, some twice, times in two zones, values missing. Someone proposes a new rule. Is it better?
#
# The first cell makes the CSV. Skip it if you have your own.

# %%
import tempfile
from pathlib import Path

import numpy as np
import polars as pl

folder = Path(tempfile.mkdtemp())

ACTIONS = np.array(["nothing", "mail", "voucher"])


def next_week(warmth, action, random):
    """A week of n customers: warmth, profit, and whether they left."""
    warmth = (
        0.8 * warmth
        + np.array([0.0, 0.12, 0.3])[action]
        + 0.05 * random.normal(size=len(warmth))
    )
    warmth = np.clip(warmth, 0.0, 1.0)
    profit = 10.0 * warmth - np.array([0.0, 0.4, 4.0])[action]
    return warmth, profit, random.random(len(warmth)) < 0.15 * (1.0 - warmth)


def play(rule, customers, weeks, random):
    """Yield weeks of those who are still there: who, warmth, action, its probability, profit, who left."""
    who, warmth = np.arange(customers), random.random(customers)
    for week in range(weeks):
        chances = rule(warmth[:, None])
        action = (random.random((len(who), 1)) > chances.cumsum(axis=1)).sum(axis=1)
        later, profit, left = next_week(warmth, action, random)
        yield (
            week,
            who,
            warmth,
            action,
            chances[np.arange(len(who)), action],
            profit,
            left,
        )
        who, warmth = who[~left], later[~left]


def today(warmth):
    """The rule that wrote the log: a coin."""
    return np.tile([0.5, 0.3, 0.2], (len(warmth), 1))


random = np.random.default_rng(0)
weeks = [
    pl.DataFrame(
        {
            "customer": [f"c{number:04d}" for number in who],
            "time": [
                f"2024-{1 + week // 4:02d}-{1 + 7 * (week % 4):02d}T10:00:00+0{1 + n % 2}:00"
                for n in who
            ],
            "warmth": warmth,
            "visits": random.poisson(3, len(who)).astype(float),
            "offer": ACTIONS[action],
            "chance": chance,
            "profit": profit.round(2),
            "left": left,
        }
    )
    for week, who, warmth, action, chance, profit, left in play(
        today, 400, 12, random
    )
]
table = pl.concat(weeks)
table = table.with_columns(
    pl.when(pl.col("visits") == 6)
    .then(None)
    .otherwise(pl.col("visits"))
    .alias("visits")
)
table = pl.concat([table, table.head(50)]).sample(
    fraction=1.0, shuffle=True, seed=1
)
table.write_csv(folder / "customers.csv")
table.head(5)

# %% [markdown]
# ## Read it
#
# Look first. `koffline data inspect customers.csv --out columns.yaml` says what each column seems to be, lists all
# that is wrong, and writes a mapping to edit.

# %%
import subprocess
import sys

import yaml

import koffline

look = "data", "inspect", "customers.csv", "--out", "columns.yaml"
seen = subprocess.run(
    [sys.executable, "-m", "koffline", *look],
    cwd=folder,
    capture_output=True,
    text=True,
    check=True,
)
print("\n".join(line for line in seen.stdout.splitlines() if "problem" in line))
print((folder / "columns.yaml").read_text())

# %% [markdown]
# It proposes to replace missing visits by their mean and to drop duplicate rows; we agree to both. It asks whether `left`, true in
# last rows only, ends an episode: yes, such a customer is gone for good. Its other guesses are right; `chance` is the probability of
# the logged offer. You would edit the file; here we do it in Python. `action_names` gives the order of the offers in the rules below.

# %%
columns = yaml.safe_load((folder / "columns.yaml").read_text())
columns |= {
    "observations": ["warmth", "visits"],
    "terminal": "left",
    "action_names": ["nothing", "mail", "voucher"],
}
del columns["last_row"]
log = koffline.open_transitions(folder / "customers.csv", mapping=columns)
print(log)
for note in log.metadata.notes:
    print("note:", note)

# %% [markdown]
# The notes say what was assumed. Customers who were still there in the last week are *truncated*: their future counts. The
# future of those who left is worth nothing.
#
# ## The question
#
# The proposal: a mail to everyone who is lukewarm, a voucher to nobody. With γ = 0.9 profit in half a year counts little.


# %%
def proposal(observations):
    """Probabilities of nothing, mail, voucher."""
    lukewarm = observations[:, 0] < 0.7
    return np.column_stack([~lukewarm, lukewarm, np.zeros(len(lukewarm))])


ranking = koffline.select_policies(
    log,
    {"proposal": proposal, "today": today},
    gamma=0.9,
    steps=500,
    resampled_replicas=5,
)
print(ranking)

# %% [markdown]
# Both rules were evaluated on the same resampled customers, so their difference is more certain than either value.
#
# ## Would another estimator say the same?
#
# The log has the probabilities of its offers, so importance sampling can answer too, without any model.

# %%
estimates = koffline.estimate_all(
    log,
    proposal,
    0.9,
    names=["kloss", "drl", "wpdis", "wdr"],
    steps=500,
    resampled_replicas=5,
)
print(estimates)
for name in ("kloss", "wdr"):
    print(name, estimates[name].estimate.warnings)

# %% [markdown]
# `kloss` and `drl`, which use every row, agree. `wpdis` adds up profits to the twelfth week only, so it answers a smaller
# question. `wpdis` and `wdr` multiply the ratios of twelve offers, so effectively 39 of 400 customers count. A warning
# says that such intervals can be too narrow; that of `wdr` is, as the truth below shows.
#
# ## The truth
#
# This world is simulated, so we can look: the two rules' true profit over 20,000 customers.


# %%
def truth(rule):
    """Mean discounted profit of a rule."""
    total = 0.0
    for week, _, _, _, _, profit, _ in play(
        rule, 20_000, 100, np.random.default_rng(7)
    ):
        total += 0.9**week * profit.sum()
    return total / 20_000


rules = {"proposal": proposal, "today": today}
for place in ranking.policies:
    low, high = place.interval.low, place.interval.high
    print(
        f"{place.name}: estimate {place.value:.1f} [{low:.1f}, {high:.1f}], truth {truth(rules[place.name]):.1f}"
    )

# %% [markdown]
# ## The decision
#
# The proposal is worth significantly more than today's rule, the verdict is *supported*, and the two estimators that use
# every row agree. Write the mail, keep the vouchers. The command line does the same, with an HTML report:
#
# ```sh
# koffline select customers.csv --mapping columns.yaml --policies rules:proposal rules:today --gamma 0.9 --out runs/decision
# ```

# %% [markdown]
# ## A better rule still
#
# Nobody has to propose a rule. `koffline.improve` learns some from one part of the log, chooses on another, and recommends
# one only if a third part, which took no part in either, says that it earns more.

# %%
portfolio = ["clone_mode", "kernel_policy_iteration-3_rounds"]
better = koffline.improve(log, gamma=0.9, settings={"candidates": portfolio})
print(better)

# %% [markdown]
# The recommended policy mixes what it has learnt with a copy of today's rule, half and half. On customers whom it has not seen it is
# worth 13 more than today's rule, and at least 5.8 more with 95 %. `out="runs/better"` would write the policy, a report with the
# customers whom it treats differently, and a model card.
