import pytest

import koffline.online.lockstep
from tests.experiments.fake_mujoco import FakeLockStep


@pytest.fixture
def fake_stack(monkeypatch: pytest.MonkeyPatch) -> type[FakeLockStep]:
    """Cells learn with this instead of `LockStep`."""
    kind = type("FreshFake", (FakeLockStep,), {"made": 0, "stop_at": None})
    monkeypatch.setattr(koffline.online.lockstep, "LockStep", kind)
    return kind
