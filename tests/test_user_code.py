"""Code that users name: what it may import from the current folder, how it may fail,
what it may change.
"""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from koffline.data.sources import write_transitions
from koffline.errors import PolicyError
from koffline.policy_specs import import_object
from koffline.untrusted.user_code import (
    modules_in,
    separate_process_state,
    user_code,
    user_modules,
)
from tests.ope.problems import discrete_log
from tests.refusals import run_cli

pytestmark = pytest.mark.usefixtures("few_features_of_memory")

SMALL = (
    "--gamma",
    "0.9",
    "--estimator",
    "is",
    "--set",
    "resampled_replicas=2",
    "--quiet",
)
PLAIN = """
import numpy as np, os, torch
def even(states):
    {inside}
    return np.full((len(states), 3), 1/3)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, which imports nothing by itself, as for the command
    `koffline`.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "path", [entry for entry in sys.path if entry not in ("", str(Path.cwd()))]
    )
    loaded = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - loaded:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def log(folder):
    write_transitions(discrete_log(120, 20), folder / "log.hdf5")
    return "log.hdf5"


IMPORTS = {
    "at once": "import uc_helper as helper\ndef f(): return helper.WORD\n",
    "later": "def f():\n    import uc_helper\n    return uc_helper.WORD\n",
    "by name": (
        "import importlib\ndef f(): return importlib.import_module('uc_helper').WORD\n"
    ),
    "a package": "from uc_package.inner import helper\ndef f(): return helper.WORD\n",
    "a folder without __init__": (
        "from uc_bare import inner\ndef f(): return inner.WORD\n"
    ),
    "what it unpickles": (
        "import pickle\ndef f(): return pickle.loads(b'cuc_helper\\nWORD\\n.')\n"
    ),
    "what torch unpickles": (
        "import io, torch\n"
        "class Nothing: pass\n"
        "def f():\n"
        "    import pickle\n"
        "    class U(pickle._Unpickler): pass\n"
        "    return U(io.BytesIO(b'cuc_helper\\nWORD\\n.')).load()\n"
    ),
}


@pytest.mark.parametrize("text", IMPORTS.values(), ids=IMPORTS)
def test_modules_of_the_folder_import_each_other_and_nobody_else_does(folder, text):
    (folder / "uc_main.py").write_text(text)
    (folder / "uc_helper.py").write_text("WORD = 'found'\n")
    (folder / "uc_package").mkdir()
    (folder / "uc_package" / "__init__.py").write_text("")
    (folder / "uc_package" / "inner.py").write_text("import uc_helper as helper\n")
    (folder / "uc_bare").mkdir()
    (folder / "uc_bare" / "inner.py").write_text("WORD = 'found'\n")
    (folder / "uc_planted.py").write_text("")
    before = list(sys.path)
    assert import_object("uc_main:f")() == "found"
    assert sys.path == before
    with pytest.raises(ModuleNotFoundError):
        import uc_planted  # noqa: F401  (a library that looks for something optional)
    with pytest.raises(PolicyError, match="No module named 'uc_gone'"):
        import_object("uc_gone:f")


def test_a_folder_hides_no_module_that_is_installed_elsewhere(folder):
    """It is a package only where nothing else has its name, as on Python's own path."""
    (folder / "tabnanny").mkdir()
    (folder / "uc_tab.py").write_text("import tabnanny\nname = tabnanny.__file__\n")
    sys.modules.pop("tabnanny", None)
    assert not import_object("uc_tab:name").startswith(str(folder))


def test_names_that_a_line_of_python_imports():
    assert modules_in("import a.b, c; from d.e import f; env = a.make()") == [
        "a.b",
        "c",
        "d.e",
    ]
    assert modules_in("import (") == []


ENDS = {
    "raise GeneratorExit": "GeneratorExit",
    "raise SystemExit(3)": "SystemExit: 3",
    "raise BaseException('no more')": "BaseException: no more",
    "import asyncio; raise asyncio.CancelledError": "CancelledError",
    "raise RecursionError": "RecursionError",
    "raise StopIteration": "StopIteration",
    "torch.set_default_device('meta')": "default device 'meta'",
}


@pytest.mark.parametrize("moment", ["imported", "called"])
@pytest.mark.parametrize("line", ENDS)
def test_a_policy_that_ends_in_any_way_is_one_line(log, folder, line, moment):
    text = PLAIN.format(inside=line if moment == "called" else "pass")
    (folder / "uc_ends.py").write_text(
        text + (f"{line}\n" if moment == "imported" else "")
    )
    done = run_cli("evaluate", log, "--policy", "uc_ends:even", *SMALL, "--out", "out")
    assert_refused_after_warning(done, ENDS[line])
    assert not (folder / "out").exists()
    assert torch.get_default_device() == torch.device("cpu")


def assert_refused_after_warning(done, *words):
    """As `assert_refused`; a first line says that the module's code runs."""
    lines = [
        line
        for line in done.stderr.splitlines()
        if not line.endswith("if you trust its author")
    ]
    assert (done.exit_code, done.stdout, len(lines)) == (2, "", 1), done.stderr
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0]


def test_a_name_that_the_module_makes_when_asked_may_fail(log, folder):
    (folder / "uc_lazy.py").write_text(
        "def __getattr__(name):\n    raise GeneratorExit\n"
    )
    assert_refused_after_warning(
        run_cli("evaluate", log, "--policy", "uc_lazy:even", *SMALL), "GeneratorExit"
    )


MOVES = {
    "imported": "import os; os.chdir('elsewhere')\n" + PLAIN.format(inside="pass"),
    "called": PLAIN.format(
        inside="os.chdir(os.path.join(os.path.dirname(__file__), 'elsewhere'))"
    ),
}
COMMANDS = {
    "evaluate": ("evaluate", "log.hdf5", "--policy", "uc_moves:even", *SMALL),
    "several": (
        "evaluate",
        "log.hdf5",
        "--policy",
        "uc_moves:even",
        *SMALL,
        "--estimator",
        "is,wis",
    ),
    "select": (
        "select",
        "log.hdf5",
        "--policies",
        "uc_moves:even",
        "policy.npz",
        *SMALL,
    ),
    "diagnose": (
        "diagnose",
        "log.hdf5",
        "--policy",
        "uc_moves:even",
        "--model",
        "model.pt",
        "--gamma",
        "0.9",
        "--trained-on",
        "other.hdf5",
        "--quiet",
    ),
}


@pytest.mark.parametrize("text", MOVES.values(), ids=MOVES)
@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_paths_mean_what_they_meant_when_the_command_began(log, folder, words, text):
    from koffline.policies import save_mlp_policy

    (folder / "elsewhere").mkdir()
    (folder / "uc_moves.py").write_text(text)
    width = discrete_log(120, 20).observation_shape[0]
    save_mlp_policy("policy.npz", [(np.ones((width, 3)), np.zeros(3))], "softmax")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        torch.jit.script(torch.nn.Linear(width, 3)).save("model.pt")
    write_transitions(
        discrete_log(120, 20).replace(rewards=np.ones(120, np.float32)),
        folder / "other.hdf5",
    )
    done = run_cli(*words, "--out", "out")
    assert done.exit_code == 0, done.output
    assert Path.cwd() == folder
    assert (folder / "out" / "report.html").exists()
    assert list((folder / "elsewhere").iterdir()) == []
    assert json.loads((folder / "out" / "run.json").read_text())["call"][
        "directory"
    ] == str(folder)


def test_user_code_stays_where_it_went_and_keeps_its_defaults_of_torch(
    tmp_path, monkeypatch
):
    """Also across calls that contain one another."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs").mkdir()

    def call(body):
        with user_code("policy", "failed", "mend it", PolicyError):
            return body()

    def move():
        os.chdir("theirs")
        torch.set_default_dtype(torch.float64)

    def where():
        return Path.cwd().name, torch.zeros(1).dtype

    with separate_process_state():
        call(lambda: call(move))
        assert where() == (tmp_path.name, torch.float32)
        assert call(where) == ("theirs", torch.float64)
        assert call(lambda: call(where)) == ("theirs", torch.float64)
        assert where() == (tmp_path.name, torch.float32)
    # outside of commands nothing is kept apart
    assert call(where) == (
        tmp_path.name,
        torch.float32,
    )


ENVIRONMENT = """
import gymnasium, os
from gymnasium.envs.classic_control import PendulumEnv
{at_import}
class Mine(PendulumEnv):
    def close(self):
        {at_close}
gymnasium.register("Mine-v0", "uc_env_class:Mine", max_episode_steps=5)
"""


@pytest.mark.parametrize(
    ("at_import", "at_close", "exit_code"),
    [
        ("pass", "pass", 0),
        ("os.chdir('elsewhere')", "raise GeneratorExit", 0),
        ("raise SystemExit", "pass", 2),
    ],
)
def test_environments_of_the_folder(folder, at_import, at_close, exit_code):
    """Their class may be in another module of the folder; one that fails to close has
    done its work.
    """
    (folder / "elsewhere").mkdir()
    (folder / "uc_env.py").write_text(
        ENVIRONMENT.format(at_import=at_import, at_close="pass")
    )
    text = ENVIRONMENT.format(at_import="pass", at_close=at_close).replace(
        "gymnasium.register", "print"
    )
    (folder / "uc_env_class.py").write_text(text.replace(", max_episode_steps=5", ""))
    words = (
        "build rollouts --env uc_env:Mine-v0 --policy uniform --episodes 2 --out"
        " new.npz --quiet"
    )
    command = [str(Path(sys.executable).with_name("koffline")), *words.split()]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == exit_code, done.stderr
    assert "Traceback" not in done.stderr
    assert (folder / "new.npz").exists() == (exit_code == 0)
    assert list((folder / "elsewhere").iterdir()) == []
    # only the command's own process found it
    assert user_modules.folders.get("uc_env") is None


def test_a_worker_takes_the_folder_off_its_path_and_finds_the_user_s_modules(
    folder, monkeypatch
):
    """As Ray starts them: the folder where the run began comes first on their path."""
    from koffline.jobs import workers

    monkeypatch.setattr(workers, "separate_state_for_good", lambda: None)
    monkeypatch.setattr(user_modules, "_named", {})
    monkeypatch.setattr(user_modules, "folders", {})
    (folder / "uc_work.py").write_text("def double(shared, item): return 2 * item\n")
    work = workers.packed_work(import_object("uc_work:double"), None)
    del sys.modules["uc_work"]
    user_modules.folders.clear()
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    double, shared = workers._unpacked_work(work)
    assert double(shared, 4) == 8
    assert str(folder) not in sys.path
    assert sys.modules["uc_work"].__file__ == str(folder / "uc_work.py")
