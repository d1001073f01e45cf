"""The table of all estimators on logs that some of them cannot use: reasons in rows, never an abort."""

import pytest

import koffline
from koffline.errors import ConfigError
from koffline.ope.evaluation import estimate_all
from koffline.ope.names import ESTIMATORS
from tests.ope.problems import QUICK, SOFT, discrete_log

TINY = {**QUICK, "steps": 10, "instruments": 60}


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_handful_of_rows(n: int) -> None:
    table = estimate_all(discrete_log(n, length=n), SOFT, 0.9, **TINY)
    for name in ESTIMATORS:
        assert (table[name].estimate is None) == (table[name].reason is not None)
    assert table["kloss"].estimate is not None
    assert table["pdis"].estimate is not None


def test_a_network_that_diverges_leaves_the_others() -> None:
    options = {**TINY, "steps": 60, "learning_rate": 1e10}
    table = estimate_all(discrete_log(), SOFT, 0.9, names=("kloss", "is", "mql"), **options)
    assert table["kloss"].estimate is None
    assert table["is"].estimate is not None
    assert "diverged" in str(table["kloss"].reason)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm_bound": 1e300}, "norm_bound"),
        ({"instruments": 10**10}, "instruments"),
        ({"features": 10**9}, "features"),
        ({"level": 1.0 - 1e-9, "interval": "kernel-calibrated"}, "draws"),
    ],
)
def test_absurd_settings_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        koffline.evaluate(discrete_log(), SOFT, 0.9, **{"estimator": "mql", **TINY, **options})
