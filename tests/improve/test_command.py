"""``koffline improve``: its folder, its refusals, going on after an interrupt."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import koffline
from koffline.data.hashing import hash_rows
from koffline.data.sources import write_transitions
from koffline.errors import ConfigError, DataError, KofflineError
from koffline.improvement import large_logs, search
from koffline.improvement.budget import budget_of
from koffline.improvement.constraint import parse_constraint
from koffline.improvement.settings import make_improve_settings, seconds_of
from koffline.improvement.work import work_place
from tests.data.logs import in_shards
from tests.improve.worlds import GAMMA, QUICK, chain_log
from tests.refusals import assert_refused, refused, run_cli, succeed

QUICKEST = {
    **QUICK,
    "candidates": ("clone_mode",),
    "shares": (1.0,),
    "finalists": 1,
    "choosing_steps": 100,
    "certifying_steps": 150,
    "full_replicas": 1,
    "resampled_replicas": 4,
}
# goes right more often than not, so that the clone's likeliest action is the best one
EXACT = chain_log(right=0.65, rows=900)


def options(**changes: object) -> list[str]:
    words = []
    for name, value in {**QUICKEST, **changes}.items():
        shown = value
        if isinstance(value, tuple):
            shown = list(value)
        words.append(f"--set={name}={json.dumps(shown)}")
    return words


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("logs") / "log.hdf5"
    write_transitions(EXACT.log, path)
    return path


@pytest.fixture(scope="module")
def better(log: Path) -> tuple[Path, str]:
    out = log.parent / "better"
    text = succeed(
        "improve", log, "--gamma", GAMMA, "--out", out, "--cores", 1, *options()
    )
    return out, text


def test_the_folder_holds_policy_report_and_card(better: tuple[Path, str]) -> None:
    out, text = better
    files = {path.name for path in out.iterdir()}
    assert {
        "policy.npz",
        "policy.pt",
        "report.html",
        "model_card.md",
        "improvement.json",
        "run.json",
    } <= files
    assert not work_place(out).exists()
    result = json.loads((out / "improvement.json").read_text())
    assert result["recommended"]
    assert result["name"] == "clone_mode"
    assert "Use clone_mode: it is worth" in text
    # the terminal says where the policy is, and what certified it
    for name in ("policy.npz", "model_card.md", "report.html"):
        assert f": {out / name}" in text
    assert f"Certified on {result['parts']['certify']['units']} episodes (" in text
    page = (out / "report.html").read_text()
    assert "A better policy" in page
    assert "Where it acts differently" in page
    assert "In every step, the trained network acts." in page
    assert "with intervals of 90%" in page
    assert result["differences"]["actions"][0]["rows"] > 0
    assert len(result["differences"]["examples"]) == 10
    card = (out / "model_card.md").read_text()
    assert card.startswith("# Policy clone_mode\n")
    assert result["data_sha256"] in card


def test_without_a_folder_the_command_says_that_nothing_is_kept(log: Path) -> None:
    text = succeed("improve", log, "--gamma", GAMMA, "--cores", 1, *options())
    assert "Use clone_mode: it is worth" in text
    assert "policy and model card were not written" in text
    assert "--out DIR" in text


@pytest.mark.parametrize("name", ["page.html", "deep/page.HTM"])
def test_beside_a_page_the_policy_is_written(name: str, tmp_path: Path) -> None:
    page = tmp_path / name
    policy_file = page.with_suffix(".npz")
    result = koffline.improve(
        EXACT.log, gamma=GAMMA, settings=QUICKEST, cores=1, out=page
    )
    assert result.recommended
    assert "A better policy" in page.read_text()
    policy = koffline.load_policy(policy_file, koffline.Discrete(2), (1,))
    assert EXACT.value(policy) == pytest.approx(EXACT.value(result.policy))
    assert sorted(page.parent.iterdir()) == sorted([page, policy_file])


@pytest.mark.parametrize("existing", ["page.html", "page.npz"])
def test_a_page_or_policy_that_is_there_is_replaced_only_by_force(
    existing: str, tmp_path: Path
) -> None:
    (tmp_path / existing).write_text("of somebody")
    page = tmp_path / "page.html"
    with pytest.MonkeyPatch.context() as patch:
        interrupted_after(patch, "fit_clone")
        with pytest.raises(DataError, match=f"{existing} exists already"):
            koffline.improve(EXACT.log, gamma=GAMMA, out=page)
        assert (tmp_path / existing).read_text() == "of somebody"
        with pytest.raises(KeyboardInterrupt):  # with force it begins
            koffline.improve(EXACT.log, gamma=GAMMA, out=page, force=True)


def test_a_folder_below_the_home_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    koffline.improve(
        EXACT.log, gamma=GAMMA, settings=QUICKEST, cores=1, out="~/runs/better"
    )
    assert (tmp_path / "runs" / "better" / "policy.npz").is_file()
    assert not (tmp_path / "~").exists()


TABLE = {
    "id": np.repeat(np.arange(12), 5),
    "t": np.tile(np.arange(5), 12),
    "x": np.linspace(-1.0, 1.0, 60),
    "a": np.arange(60) % 2,
    "r": np.linspace(0.0, 1.0, 60),
    "cost": np.linspace(0.0, 2.0, 60),
    "word": ["fine"] * 60,
    "hole": [None, *[1.0] * 59],
    "endless": [np.inf, *[1.0] * 59],
}
ROLES = {
    "observations": "x",
    "action": "a",
    "reward": "r",
    "episode": "id",
    "time": "t",
    "last_row": "terminal",
}


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ("cst", ["no column 'cst' (constraint)", "did you mean 'cost'"]),
        ("cost + cst", ["no column 'cst' (constraint 'cost + cst')"]),
        ("word", ["column word is not all numbers", "(a constraint)"]),
        ("hole", ["(hole: 1, of 60 rows)", "give a number in every row"]),
        ("endless", ["column endless holds inf", "finite numbers"]),
        ("cost +", ["the formula 'cost +' cannot be read"]),
        ("x_*", ["x_*"]),
    ],
)
def test_a_bad_column_of_a_constraint_is_named_as_one(
    column: str, words: list[str]
) -> None:
    with pytest.raises(DataError) as caught:
        koffline.improve(
            pl.DataFrame(TABLE),
            gamma=GAMMA,
            mapping=ROLES,
            constraint=f"{column} <= 2",
            settings=QUICKEST,
        )
    message = str(caught.value)
    assert message.startswith(f"constraint {column} <= 2: ")
    assert "reward" not in message
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ("cost", TABLE["cost"]),
        ("x", TABLE["x"]),  # a state, too, can be kept within a limit
        ("a", TABLE["a"]),
        ("r", TABLE["r"]),
        ("2 * cost - x", 2 * TABLE["cost"] - TABLE["x"]),
        ("word == 'fine'", np.ones(60)),
    ],
)
def test_columns_and_formulas_that_a_constraint_may_have(
    column: str, expected: np.ndarray
) -> None:
    table = pl.DataFrame(TABLE)
    log = koffline.open_transitions(table, mapping=ROLES)
    limit = parse_constraint(f"{column} <= 2")
    assert limit is not None
    costs = limit.costs_of(log, table, None, ROLES)
    assert costs == pytest.approx(np.asarray(expected, np.float64), rel=1e-6)


def test_the_written_policy_is_read_by_evaluate(
    better: tuple[Path, str], log: Path
) -> None:
    out, _ = better
    quick = ["--set=steps=60", "--set=full_replicas=1", "--set=resampled_replicas=2"]
    policy = out / "policy.npz"
    text = succeed(
        "evaluate", log, "--policy", policy, "--gamma", GAMMA, "--json", *[*quick]
    )
    estimate = json.loads(text)
    assert estimate["policy"].endswith("policy.npz")
    # it was learnt from some of these rows
    kinds = [reason["kind"] for reason in estimate["verdict"]["reasons"]]
    assert "training" in kinds
    chosen = koffline.load_policy(policy, koffline.Discrete(2), (1,))
    assert EXACT.value(chosen) > EXACT.value(EXACT.behavior)


def test_results_are_not_replaced_without_force(
    better: tuple[Path, str], log: Path
) -> None:
    out, _ = better
    assert_refused(run_cli("improve", log, "--out", out), "exists already", "--force")
    with pytest.raises(DataError, match="exists already"):
        koffline.improve(log, gamma=GAMMA, out=out)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--gamma", "1.5"], ["1.5"]),
        (["--budget", "soon"], ["budget is 'soon'", "10m"]),
        (["--set", "finalist=2"], ["finalist", "finalists"]),
        (["--set", "finalists=0"], ["finalists is 0"]),
        (["--set", 'candidates=["dqm"]'], ["no candidate 'dqm'", "kloss_dqn"]),
        (["--set", "candidates=dqm"], ["no candidate 'dqm'", "kloss_dqn"]),
        (["--set", "candidates=[]"], ["candidates is []", "at least 1"]),
        (["--set", 'candidates=[""]'], ["candidates", "at least 1"]),
        (["--set", "shares=[0.5, 0.5]"], ["shares", "equal in six digits"]),
        (["--set", "shares=[0.1234567, 0.12345671]"], ["equal in six digits"]),
        (["--constraint", "cost"], ["constraint is 'cost'", "COLUMN <= X"]),
        (["--constraint", "cost <= 2"], ["no table", "in Python"]),
        (["--resume"], ["--out"]),
        (["--level", "1"], ["--level"]),
        (["--policy", "uniform"], ["--policy"]),
        (["--by", "weight"], ["weight"]),
    ],
)
def test_refusals(words: list[str], shown: list[str], log: Path) -> None:
    if "--gamma" not in words:
        words = ["--gamma", str(GAMMA), *words]
    quick = options()
    if "--set" in words:
        quick = []
    ended = run_cli(*["improve", log, *words, *quick])
    for word in shown:
        assert_refused(ended, word)


def test_a_missing_gamma_is_asked_for(log: Path) -> None:
    log_without = EXACT.log
    with pytest.raises(ConfigError, match="gamma is missing"):
        koffline.improve(log_without, settings=QUICKEST)


def bandit(rows: int = 20, **changes: object) -> koffline.Transitions:
    """Rows that end by themselves, with random actions and rewards."""
    generator = np.random.default_rng(0)
    states = generator.normal(size=(rows, 2))
    columns: dict = {
        "observations": states,
        "actions": generator.integers(2, size=rows),
        "rewards": generator.normal(size=rows),
        "next_observations": states,
        "terminated": np.ones(rows, bool),
        "truncated": np.zeros(rows, bool),
        "episode_ids": np.arange(rows),
        "action_space": koffline.Discrete(2),
    }
    return koffline.Transitions(**{**columns, **changes})


COSTS = {"name": "effort", "costs": np.ones(20), "at_most": 1.0}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"seed": "a"}, "seed is 'a'"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"budget": [1]}, "budget is"),
        ({"settings": "x"}, "settings is 'x'; give a mapping"),
        ({"settings": [1]}, "settings is '.1.'; give a mapping"),
        ({"settings": {"shares": (0.5, 0.5)}}, "equal in six digits"),
        ({"constraint": ["a"]}, "constraint is a list"),
        ({"constraint": {**COSTS, "costs": ["x"] * 20}}, "not all numbers"),
        ({"constraint": {**COSTS, "costs": [[1], [1, 2]]}}, "not all numbers"),
        ({"constraint": {**COSTS, "costs": np.ones((20, 1))}}, "for 20 rows"),
        ({"constraint": {**COSTS, "at_most": "x"}}, "'effort <= x', without a finite"),
        ({"constraint": {**COSTS, "at_most": np.inf}}, "without a finite bound"),
        ({"by": {}}, "by has 0 columns; give one"),
        ({"by": {"a": [1] * 20, "b": [1] * 20}}, "by has 2 columns; give one"),
        ({"resume": True}, "name the folder by out"),
        ({"out": 3}, "out 3 cannot be written"),
        ({"out": "a\0b"}, "cannot be written"),
        ({"out": "n" * 240}, "cannot be written .File name too long"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_before_any_work(
    arguments: dict, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(search, "fit_clone", None)
    with refused(KofflineError, words):
        koffline.improve(bandit(), gamma=GAMMA, **{"settings": QUICKEST, **arguments})
    assert not list(tmp_path.iterdir())


def test_an_out_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(KofflineError, match="cannot be written"):
        koffline.improve(bandit(), gamma=GAMMA, out=tmp_path / "file" / "out")


def test_rewards_without_finite_squares_are_refused() -> None:
    log = bandit(rewards=np.linspace(-1e300, 1e300, 20))
    with pytest.raises(DataError, match="rescale the rewards below 1e100"):
        koffline.improve(log, gamma=GAMMA, settings=QUICKEST)


def test_rows_that_stand_alone_and_go_on_are_refused() -> None:
    """What the present policy earns after them is unknown, so there is no uplift."""
    log = bandit(episode_ids=None, terminated=np.arange(20) < 18)
    with pytest.raises(DataError, match="no episodes, and 2 rows of it"):
        koffline.improve(log, gamma=GAMMA, settings=QUICKEST)


@pytest.mark.parametrize(
    "words",
    [
        ["--by", "nope"],
        ["--constraint", "nope"],
        ["--set", "finalists=0"],
        ["--set", 'candidates=["dqm"]'],
        ["--gamma", "1"],
        ["--budget", "soon"],
    ],
)
def test_a_refused_command_takes_away_nothing_of_an_interrupted_search(
    words: list[str], log: Path, tmp_path: Path
) -> None:
    kept = work_place(tmp_path / "better") / "candidates" / "clone_mode.npz"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"hours of work")
    out = tmp_path / "better"
    command = ["improve", log, "--gamma", GAMMA, "--out", out]
    assert run_cli(*[*command, *words]).exit_code
    assert kept.read_bytes() == b"hours of work"


def test_a_refused_command_leaves_no_folder(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "better"
    run_cli("improve", log, "--gamma", GAMMA, "--out", out, "--by", "nope")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"constraint": {**COSTS, "costs": np.zeros(20)}}, "constraint is effort"),
        ({"constraint": {**COSTS, "at_most": 1.0 + 1e-9}}, "constraint is effort"),
        ({"constraint": None}, "constraint is effort"),
        ({"by": {"half": np.zeros(20)}}, "by is half"),
        ({"action_space": koffline.Discrete(3)}, "actions is Discrete"),
        ({"seed": 1}, "seed is 0 there and 1 here"),
        ({"level": 0.9}, "level is 0.95 there and 0.9 here"),
        (
            {"settings": {**QUICKEST, "choosing_steps": 101}},
            "settings is {'choosing_steps': 100} there and {'choosing_steps': 101} here",
        ),
    ],
)
def test_whatever_changes_a_search_makes_it_another_one(
    changes: dict, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted_after(monkeypatch, "fit_clone")
    log = bandit()
    begun = {"gamma": GAMMA, "constraint": COSTS, "by": {"half": np.arange(20) % 2}}
    begun |= {"settings": QUICKEST, "cores": 1, "out": tmp_path / "better"}
    with pytest.raises(KeyboardInterrupt):
        koffline.improve(log, **begun)
    with pytest.raises(KeyboardInterrupt):  # the same search goes on
        koffline.improve(log, **begun, resume=True)
    if "action_space" in changes:
        changes = {}
        log = bandit(action_space=koffline.Discrete(3))
    with pytest.raises(ConfigError, match=words):
        koffline.improve(log, **{**begun, **changes}, resume=True)


def interrupted_after(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(search, stage, stop)


@pytest.mark.parametrize("stage", ["screen", "certify"])
def test_an_interrupted_search_goes_on_and_ends_the_same(
    stage: str, better: tuple[Path, str], log: Path, tmp_path: Path
) -> None:
    undisturbed, _ = better
    out = tmp_path / "better"
    words = ["improve", log, "--gamma", GAMMA, "--out", out, "--cores", 1, *options()]
    with pytest.MonkeyPatch.context() as patch:
        interrupted_after(patch, stage)
        ended = run_cli(*list(words))
    assert ended.exit_code == 130
    assert "--resume goes on" in ended.stderr
    assert not out.exists()
    assert (work_place(out) / "candidates" / "clone_mode.npz").is_file()
    with pytest.MonkeyPatch.context() as patch:
        # what is done is not done again
        patch.setattr(search, "fit_clone", None)
        patch.setattr(search, "train_candidate", None)
        succeed(*[*words, "--resume"])
    for name in ("improvement.json", "policy.npz"):
        assert (out / name).read_bytes() == (undisturbed / name).read_bytes()
    assert not work_place(out).exists()


def test_another_search_is_not_gone_on_with(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "better"
    words = ["improve", log, "--gamma", GAMMA, "--out", out, *options()]
    with pytest.MonkeyPatch.context() as patch:
        interrupted_after(patch, "screen")
        run_cli(*list(words))
    ended = run_cli(*[*words, "--seed", 1, "--resume"])
    assert_refused(ended, "holds another search", "seed is 0 there and 1 here")
    with pytest.MonkeyPatch.context() as patch:
        interrupted_after(patch, "screen")
        ended = run_cli(*list(words))
    assert f"{work_place(out)} holds what an earlier search has done" in ended.stderr
    assert "with --resume it would go on" in ended.stderr


def test_a_file_is_no_folder_for_results(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "better"
    out.write_text("mine")
    for further in ([], ["--force"]):
        words = ["improve", log, "--gamma", GAMMA, "--out", out]
        ended = run_cli(*[*words, *further])
        assert_refused(ended, f"{out} is a file; name a folder")
    assert out.read_text() == "mine"


def test_a_link_to_a_folder_stays_one(log: Path, tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    link = tmp_path / "link"
    link.symlink_to(real)
    for further in ([], ["--force"]):
        words = ["improve", log, "--gamma", GAMMA, "--out", link, *options()]
        succeed(*[*words, *further])
        assert link.is_symlink()
        assert (real / "improvement.json").is_file()


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("by", [0, "labels"])
def test_too_many_groups_are_refused_before_any_work(
    by: object, lazy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "fit_clone", None)
    log = EXACT.log
    if by == "labels":
        by = {"number": np.arange(log.n_episodes)}
    if lazy:
        log = in_shards(log, tmp_path / "log", 300)
    with pytest.raises(ConfigError, match=r"different values .* make fewer groups"):
        koffline.improve(log, gamma=GAMMA, settings=QUICKEST, by=by)


@pytest.mark.parametrize("folds", [1, 5])
def test_a_constraint_that_nothing_keeps_is_the_reason(folds: int) -> None:
    log = bandit(300)
    log = log.replace(rewards=log.rewards + 3.0 * np.asarray(log.actions))
    settings = {**QUICKEST, "candidates": (ITERATION,), "folds": folds}
    free = {"name": "effort", "costs": np.ones(300), "at_most": 2.0}
    never = {**free, "at_most": 0.5}
    plain, kept, broken = (
        koffline.improve(log, gamma=GAMMA, settings=settings, constraint=limit, cores=1)
        for limit in (None, free, never)
    )
    assert plain.finalists
    assert kept.uplift == plain.uplift
    assert broken.reason.kind == "constraint"
    assert "not within the constraint" in broken.reason.text
    assert not broken.finalists  # rows to certify on were not looked at
    assert any(item.note == "constraint" for item in broken.candidates)


def test_a_candidate_that_cannot_be_trained_is_dropped_with_a_note() -> None:
    settings = {**QUICKEST, "candidates": ("clone_mode", "discrete_cql-alpha_4")}
    with pytest.MonkeyPatch.context() as patch:
        train = search.train_candidate

        def fail(spec, part, steps, seed):
            if spec.kind == "discrete_cql":
                raise ConfigError("the training of discrete_cql diverged")
            return train(spec, part, steps, seed)

        patch.setattr(search, "train_candidate", fail)
        result = koffline.improve(EXACT.log, gamma=GAMMA, settings=settings, cores=1)
    (dropped,) = result.dropped
    assert dropped["name"] == "discrete_cql-alpha_4"
    assert "diverged" in dropped["reason"]
    assert result.recommended
    assert "not tried: discrete_cql-alpha_4" in str(result)


ITERATION = "kernel_policy_iteration-1_round"


def used_up(patch: pytest.MonkeyPatch) -> None:
    """Every look at the clock is a thousand seconds after the last one."""
    clock = itertools.count(0.0, 1000.0)
    patch.setattr(search.time, "time", lambda: next(clock))


@pytest.mark.parametrize("budget", ["1s", 600, "1h"])
@pytest.mark.parametrize("cores", [1, 2])
def test_however_short_a_budget_is_the_clone_is_tried(
    budget: str | int, cores: int
) -> None:
    settings = {**QUICKEST, "candidates": ("clone_mode", ITERATION)}
    with pytest.MonkeyPatch.context() as patch:
        if budget == 600:
            used_up(patch)
        result = koffline.improve(
            EXACT.log, gamma=GAMMA, settings=settings, budget=budget, cores=cores
        )
    assert result.recommended
    tried = {candidate.name.partition("@")[0] for candidate in result.candidates}
    if budget == "1h":
        assert tried == {"clone_mode", ITERATION}
        assert not result.dropped
    if budget == 600 and cores == 1:
        assert tried == {"clone_mode"}
        (line,) = result.not_tried
        assert line.startswith(f"not tried: {ITERATION}: not reached by the budget")
        # rows to certify on were looked at: going on would do so twice
        assert "--resume" not in line
        enough, _, rest = line.rpartition("about ")[2].partition(" ")
        assert rest == "would do"
        assert 5.0 < seconds_of(enough) < 600.0


def test_a_longer_budget_trains_the_rest(tmp_path: Path) -> None:
    """The likeliest action is the worse one, and nothing else was tried in time."""
    exact = chain_log(right=0.35, rows=900)
    write_transitions(exact.log, tmp_path / "log.hdf5")
    out = tmp_path / "better"
    of_search = options(candidates=("clone_mode", ITERATION))
    of_search += ["--gamma", str(GAMMA), "--out", str(out), "--cores", "1"]

    def words(further: str) -> list[str]:
        return ["improve", str(tmp_path / "log.hdf5"), *of_search, *further.split()]

    with pytest.MonkeyPatch.context() as patch:
        used_up(patch)
        text = succeed(*words("--budget 10m"))
    assert "Keep the present policy. Budget: " in text
    assert f"the budget did not reach 1 candidate ({ITERATION})" in text
    first = json.loads((out / "improvement.json").read_text())
    assert first["reason"]["kind"] == "budget"
    mode = work_place(out) / "candidates" / "clone_mode.npz"
    written = mode.stat().st_mtime_ns
    assert not (work_place(out) / "finalists.json").exists()
    with pytest.MonkeyPatch.context() as patch:
        interrupted_after(patch, "screen")
        run_cli(*words("--budget 1h --resume --force"))
    assert mode.stat().st_mtime_ns == written  # it was not trained again
    remedy = first["reason"]["remedy"].partition("with ")[2].partition(" the same")[0]
    assert remedy.endswith("--resume --force")
    text = succeed(*words(remedy))
    second = json.loads((out / "improvement.json").read_text())
    assert not second["dropped"]
    tried = {item["name"].partition("@")[0] for item in second["candidates"]}
    assert tried == {"clone_mode", ITERATION}
    assert not work_place(out).exists()


def test_a_budget_that_reaches_none_of_the_named_candidates_keeps_the_policy() -> None:
    settings = {**QUICKEST, "candidates": (ITERATION,)}
    with pytest.MonkeyPatch.context() as patch:
        used_up(patch)
        result = koffline.improve(
            EXACT.log, gamma=GAMMA, settings=settings, budget="10m", cores=1
        )
    assert not result.recommended
    assert result.reason.kind == "budget"
    assert result.candidates == ()
    assert "Keep the present policy" in result._repr_html_()


@pytest.mark.parametrize(
    ("seconds", "budget"),
    [(1.0, "1s"), (89.2, "90s"), (90.0, "2m"), (5399.0, "90m"), (5400.0, "1.5h")],
)
def test_an_estimated_budget_can_be_given(seconds: float, budget: str) -> None:
    assert budget_of(seconds) == budget
    assert seconds_of(budget) >= seconds


def test_budgets() -> None:
    assert seconds_of("10m") == 600.0
    assert seconds_of("1.5h") == 5400.0
    assert seconds_of(90) == 90.0
    assert seconds_of(None) is None
    for budget in ("-3m", "10 parsecs", 0, True, "nan"):
        with pytest.raises(ConfigError, match="budget is"):
            seconds_of(budget)


def test_a_constraint_is_certified_or_keeps_the_present_policy() -> None:
    costs = np.asarray(EXACT.log.actions, np.float64)  # of going right
    results = []
    for at_most in (10.0, 0.1):
        constraint = {"name": "effort", "costs": costs, "at_most": at_most}
        results.append(
            koffline.improve(
                EXACT.log,
                gamma=GAMMA,
                settings=QUICKEST,
                constraint=constraint,
                cores=1,
            )
        )
    kept, broken = results
    assert kept.recommended
    assert kept.constraint["high"] <= 10.0
    # it goes right until the end: more than 0.1 for certain
    assert not broken.recommended
    assert kept.constraint["value"] > 1.0
    with pytest.raises(DataError, match="one number for each row"):
        koffline.improve(
            EXACT.log,
            gamma=GAMMA,
            settings=QUICKEST,
            constraint={"name": "effort", "costs": costs[:-1], "at_most": 1.0},
        )


def test_values_of_groups_and_a_notebook(tmp_path: Path) -> None:
    labels = np.arange(EXACT.log.n_episodes) % 2
    result = koffline.improve(
        EXACT.log, gamma=GAMMA, settings=QUICKEST, by={"half": labels}, cores=1
    )
    assert [row.group for row in result.groups] == ["0", "1"]
    assert sum(row.starts for row in result.groups) == result.parts["certify"]["units"]
    assert "A better policy" in result._repr_html_()
    page = result.report(tmp_path / "page.html")
    assert "By half" in page.read_text()
    assert result.plot().get_xlabel().startswith("uplift")


def test_a_log_on_disk_is_sampled_and_certified_whole(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = tmp_path / "shards"
    succeed("data", "convert", log, shards, "--shard-rows", 200)
    lazy = koffline.open_transitions(shards, lazy=True)
    parts = large_logs.parts_of(lazy, 0, tmp_path / "work", held_bytes=0.0)
    assert not isinstance(parts.certify, koffline.Transitions)
    rows = len(parts.train) + len(parts.choose) + len(parts.certify)
    assert rows == len(lazy)  # the samples hold all rows of so small a log
    hashes = [
        set(hash_rows(part).tolist())
        for part in (parts.train, parts.choose, parts.certify.load())
    ]
    assert not hashes[0] & hashes[2]
    assert not hashes[1] & hashes[2]
    monkeypatch.setattr(large_logs, "HELD_BYTES", 0.0)
    result = koffline.improve(shards, gamma=GAMMA, settings=QUICKEST, cores=1)
    assert result.recommended
    assert any("stay on disk" in note for note in result.notes)


NEEDS_ROWS = {
    "constraint": {
        "constraint": {
            "name": "effort",
            "costs": np.asarray(EXACT.log.actions, np.float64),
            "at_most": 10.0,
        }
    },
    "by": {"by": {"half": np.arange(EXACT.log.n_episodes) % 2}},
}


@pytest.mark.parametrize("name", NEEDS_ROWS)
@pytest.mark.parametrize("lazy", [False, True])
def test_costs_and_labels_of_a_log_on_disk(
    name: str, lazy: bool, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small log is read; of a large one the refusal says how, and that works."""
    shards = tmp_path / "shards"
    succeed("data", "convert", log, shards, "--shard-rows", 200)
    options = {"gamma": GAMMA, "settings": QUICKEST, "cores": 1, **NEEDS_ROWS[name]}
    source = shards
    if lazy:
        source = koffline.open_transitions(shards, lazy=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(large_logs, "HELD_BYTES", 0.0)
            with pytest.raises(DataError, match="needs the log in memory") as caught:
                koffline.improve(source, **options)
        message = str(caught.value)
        assert "\n" not in message
        assert f"its {len(EXACT.log)} rows" in message
        # the remedy, on a log that is still too large to be read unasked
        monkeypatch.setattr(large_logs, "HELD_BYTES", 0.0)
        place = message.partition("open_transitions('")[2].partition("')")[0]
        source = koffline.open_transitions(place)
    result = koffline.improve(source, **options)
    assert result.recommended
    if name == "by":
        assert [row.group for row in result.groups] == ["0", "1"]
    else:
        assert result.constraint["high"] <= 10.0


def test_settings() -> None:
    assert make_improve_settings(None).finalists == 2
    assert make_improve_settings({"finalists": 2}).finalists == 2
    with pytest.raises(ConfigError, match="shares"):
        make_improve_settings({"shares": (0.0,)})
