"""``python -m tests.faults.shrunk_reproduce reproduce …``: the command with experiments
of seconds.
"""

import pytest

from koffline.cli import main
from tests.experiments.shrunk import shrink_experiments

if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        shrink_experiments(patch)
        main()
