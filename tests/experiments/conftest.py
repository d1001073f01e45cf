import sys
import types

import pytest

from tests.experiments.fake_mujoco import FakeLockStep


@pytest.fixture
def fake_stack(monkeypatch: pytest.MonkeyPatch) -> type[FakeLockStep]:
    """Cells learn with this instead of `LockStep`."""
    module = types.ModuleType("koffline.online.lockstep")
    kind = type("FreshFake", (FakeLockStep,), {"made": 0, "stop_at": None})
    module.LockStep = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "koffline.online.lockstep", module)
    return kind
