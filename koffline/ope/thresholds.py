"""Every threshold that decides a verdict, refuses an interval, or warns of an estimate.

A comment says what was measured, where a measurement is on record; "a convention" means
that none is.
This file imports nothing, so that every room of `koffline.ope` can read it. Tests
with thresholds of their own, which yield reasons for a verdict ready-made, keep them:
signs that a log was misread (`koffline.data.structure`), the order of actions
(`koffline.ope.assumptions.action_order`), and rows that a policy was trained on
(`koffline.ope.cross_fit`).
"""

# --- Not answerable: the log does not say what the policy is worth -------------------

# Share of the policy's actions that lie near logged ones; a convention.
NO_COVERAGE = 0.5
# The same in start states, which are few; a convention.
NO_COVERAGE_OF_STARTS = 0.2
# Share of the policy's actions, or of its visits, where the log hardly takes them; a
# convention.
MUCH_UNLOGGED = 0.1
# Half width of the interval, in rms returns; a convention.
TOO_WIDE = 1.0

# --- With care: coverage and support --------------------------------------------------

# Share of the policy's actions that lie near logged ones; 0.95 if it had written the
# log. A convention.
LOW_COVERAGE = 0.8
# The same in start states; a convention.
LOW_COVERAGE_OF_STARTS = 0.5
# Share of the policy's actions that the log never or hardly takes; a convention.
SOME_UNLOGGED = 0.001
# Rows of an action below which the log tells its value only if the policy does not take
# it much more often; a convention.
FEW_ROWS_OF_ACTION = 30
# How many times as often as the log the policy takes an action that is then unknown; a
# convention.
OVERUSED = 3.0
# Share of the policy's visits to states near which the log does not take its action,
# with discrete and with continuous actions; conventions.
HOLES_OF_DISCRETE = 0.02
HOLES_OF_CONTINUOUS = 0.06
# Deviations, in each dimension, within which continuous actions are alike (for the
# numbers of discrete ones: any value below 1); a convention.
LIKE_ACTIONS = 0.5
# Expected number of rows with a like action among nearer rows that have none: if the
# log took the action there as often as elsewhere, a visit would exceed it with
# probability exp(-5).
EXPECTED_LIKE = 5.0
# Effective number of episodes or rows that carry the weight, and terminations of a log
# whose rewards are all alike; a convention.
FEW_WEIGHTED = 10.0
# Distance from 1 of the mean weight of the policy's visits, which is 1 for the true
# weights; a convention.
MASS_OFF = 0.2
# Share of the weights' size that is negative, which is 0 for the true weights; a
# convention.
MUCH_NEGATIVE = 0.25
# Share of the rows that the policy was trained on; a convention.
FEW_SEEN = 0.02

# --- With care: size and horizon ------------------------------------------------------

# Effective number of episodes, rows or clusters; a convention.
FEW_UNITS = 20.0
# Half width of the interval, in rms returns; a convention.
WIDE = 0.25
# Half width of the interval, in mean |return|s; a convention.
WIDE_OF_USUAL = 0.5
# Share of a constant reward's value beyond the longest episode; a convention.
MUCH_UNSEEN = 0.2

# --- With care: what is not in the state, and drift -----------------------------------

# p-value of a shift. Measured: one in hundreds of right answers was below 1e-3.
SHIFT_P_VALUE = 1e-4
# The same of a group of start states, and of sums where only last rows have rewards: to
# refuse what does not matter costs less there than a wrong value; a convention.
SHIFT_P_VALUE_MILD = 1e-2
# Size of a shift, as a share of the interval's width: half of the half width.
SHIFT_OF_WIDTH = 0.25
# Share of episodes cut at the last step beyond which adding the step to the state would
# extrapolate to unseen steps; a convention.
MANY_CUT = 0.2

# --- No interval ----------------------------------------------------------------------

# Effective number of units; allows two of slightly different weight.
FEWEST_UNITS = 1.9
# Effective number of episodes that carry the weight of an importance sampling estimate.
FEWEST_WEIGHTED = 2.0
# Share of a constant reward's value beyond the longest episode; a convention.
MOST_UNSEEN = 0.5
# Gap between the intervals of two heads, and difference of two heads that is reported,
# in rms returns; a convention.
NOTABLE = 0.02
# Rounding and unfinished training alone explain a value beyond its bounds by this share
# of the bound, or of the largest value.
SLACK_OF_BOUND = 1e-2
SLACK_OF_LARGEST = 1e-3
# Share of the draws of a bootstrap over episodes that must be finite; a convention.
FEWEST_FINITE_DRAWS = 0.9
# Calibration error of a classifier that the user chose for the behavior policy. Measured
# on 1,200 rows of a policy whose chances jump from 0.1 to 0.9: a logistic model has 0.12
# to 0.24, a forest 0.04 to 0.06.
POOR_CALIBRATION = 0.1

# --- Estimates: choices and warnings --------------------------------------------------

# Effective number of episodes from which ``auto`` takes ``dr`` for one-step logs; a
# convention.
ENOUGH_WEIGHTED = 30.0
# Effective share of the episodes. Measured: below it, 95 % intervals covered the truth in
# 76 to 91 % of logs of finite chains.
UNEVEN_WEIGHTS = 0.5
# Share of the value after cuts that is reported, and above which the mean return of the
# log is no value of the behavior policy; a convention.
CUT_SHARE = 0.01
# Root mean square of residuals, in rms returns; those of a zero value function are below
# one.
LARGE_RESIDUAL = 3.0
# Effective number of start states of a group below which it has no value; a convention.
FEWEST_STARTS = 10.0
