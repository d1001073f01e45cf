"""Texts that are not what they seem: words for missing values, texts in formulas,
commas and points.
"""

import pyarrow as pa
import pyarrow.parquet
import pytest

from koffline.data.sources import open_raw, open_transitions
from koffline.data.table.inspection import inspect_table
from koffline.data.table.missing import MISSING_WORDS
from koffline.errors import DataError
from tests.data.table_rows import assert_same_in_pieces
from tests.refusals import one_line

MAPPING = {
    "observations": "x",
    "action": "a",
    "reward": "r",
    "episode": "e",
    "time": "t",
    "terminal": "done",
}
ROWS = {
    "x": ["1", "2", "3", "4"],
    "a": ["0", "1", "0", "1"],
    "r": ["1", "2", "3", "4"],
    "e": ["b", "b", "c", "c"],
    "t": ["0", "1", "0", "1"],
    "done": ["no", "yes", "no", "yes"],
    "region": ["EU", "US", "EU", "US"],
    "dose": ["1", "2", "1", "2"],
}


def write_csv(path, separator=",", **columns):
    rows = {**ROWS, **columns}
    lines = [
        separator.join(rows),
        *(separator.join(row) for row in zip(*rows.values(), strict=True)),
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_parquet(path, **columns):
    numbers = {name: list(map(float, ROWS[name])) for name in ("x", "r", "t")}
    pa.parquet.write_table(pa.table({**ROWS, **numbers, **columns}), path)
    return path


def read(path, **changes):
    """The log, the same at once and in pieces."""
    mapping = {
        name: value
        for name, value in {**MAPPING, **changes}.items()
        if value is not None
    }
    log = open_transitions(path, mapping=mapping)
    assert_same_in_pieces(path, mapping, log)
    return log


def refusal(path, **changes):
    with one_line(DataError) as caught:
        open_raw(
            path,
            None,
            {
                name: role
                for name, role in {**MAPPING, **changes}.items()
                if role is not None
            },
        )
    return str(caught.value)


@pytest.mark.parametrize(
    "word", [*MISSING_WORDS, "NA", "NULL", "NaN", "None", "N/A", " na "]
)
class TestWordsForMissing:
    def test_are_missing_in_numbers(self, tmp_path, word):
        path = write_csv(
            tmp_path / "log.csv", x=["1", word, "3", word], r=["1", "2", "", word]
        )
        message = refusal(path)
        assert "values are missing (x: 2, r: 2, of 4 rows)" in message
        assert "NA, null and the like are missing values" in message
        log = read(path, impute={"x": 9.0, "r": 5.0})
        assert log.observations.ravel().tolist() == [1.0, 9.0, 3.0, 9.0]
        assert log.rewards.tolist() == [1.0, 2.0, 5.0, 5.0]
        note = (
            "words such as NA, null and nan were taken for missing values (r: 1, x: 2)"
        )
        assert note in log.metadata.notes  # the empty field is no word

    def test_are_missing_in_times_flags_and_numbered_actions(self, tmp_path, word):
        for name in ("t", "done", "a"):
            column = [word, *ROWS[name][1:]]
            path = write_csv(tmp_path / f"{name}.csv", **{name: column})
            assert f"values are missing ({name}: 1, of 4 rows)" in refusal(path)
        path = write_csv(tmp_path / "starts.csv", done=["yes", word, "yes", "no"])
        without = dict.fromkeys(("episode", "time", "terminal"))
        assert "values are missing (done: 1," in refusal(
            path, starts="done", last_row="cut", **without
        )
        dates = [word, "2024-01-02", "2024-01-01", "2024-01-02"]
        assert "values are missing (t: 1," in refusal(
            write_csv(tmp_path / "dates.csv", t=dates)
        )

    def test_are_missing_in_numbered_ids(self, tmp_path, word):
        path = write_csv(tmp_path / "log.csv", e=[word, "1", "2", "2"])
        assert "values are missing (e: 1," in refusal(path)

    def test_are_labels_in_labels(self, tmp_path, word):
        word = word.strip()
        path = write_csv(
            tmp_path / "log.csv",
            a=["mail", word, word, ""],
            region=[word, "US", word, ""],
        )
        assert "(a: 1, region: 1, of 4 rows)" in refusal(
            path, observations=["x", "region"], encode={"region": "one-hot"}
        )
        path = write_csv(
            tmp_path / "log.csv",
            a=["mail", word, word, "call"],
            region=[word, "US", word, "US"],
        )
        reward = f"10 * (region == '{word}') + (region == 'US')"
        log = read(
            path,
            observations=["x", "region"],
            encode={"region": "one-hot"},
            reward=reward,
        )
        assert set(log.metadata.extra["action_names"]) == {"mail", word, "call"}
        assert log.rewards.tolist() == [10.0, 1.0, 10.0, 1.0]
        assert f"region={word}" in log.feature_names
        for name in ("a", "region"):
            assert any(
                f"in 2 rows {name} is a word such as NA or null" in text_of_note
                for text_of_note in log.metadata.notes
            )
        raw = open_raw(path, None, {**MAPPING, "by": "region"})
        assert raw.labels.tolist() == [word, word]
        assert any(
            "in 2 rows region is a word such as NA" in note
            for note in raw.metadata.notes
        )

    def test_are_ids_among_texts_with_a_note(self, tmp_path, word):
        word = word.strip()
        log = read(write_csv(tmp_path / "log.csv", e=[word, word, "c", "c"]))
        assert log.episode_ids.tolist() == [0, 0, 1, 1]
        assert any(
            "in 2 rows e is a word such as NA or null" in note
            for note in log.metadata.notes
        )

    def test_inspect_tells_numbers_flags_and_labels_apart(self, tmp_path, word):
        done = ["no", "yes", "no", word]
        region = ["EU", "US", word, word]
        path = write_csv(
            tmp_path / "log.csv", x=["1", word, "3", "4"], done=done, region=region
        )
        profiles = {profile.name: profile for profile in inspect_table(path).columns}
        assert {
            name: profile.missing
            for name, profile in profiles.items()
            if profile.missing
        } == {
            "x": 1,
            "done": 1,
        }
        assert profiles["region"].distinct == 3
        assert profiles["done"].role == "terminal"


def test_a_formula_of_numbers_counts_its_words(tmp_path):
    path = write_csv(tmp_path / "log.csv", r=["1", "NA", "3", "4"])
    reward = "r - 1"
    log = read(path, reward=reward, impute={"reward": 7.0})
    assert log.rewards.tolist() == [0.0, 7.0, 2.0, 3.0]
    assert (
        "words such as NA, null and nan were taken for missing values (r: 1)"
        in log.metadata.notes
    )


# How a column writes what it holds, the text of the formula, rewards or words of the
# refusal.
YES = [10.0, 0.0, 10.0, 10.0]
COMPARED = [
    ([True, False, True, True], "True", YES),
    ([True, False, True, True], "true", YES),
    ([True, False, True, True], "TRUE", YES),
    ([True, False, True, True], "yes", "no row holds 'yes' in sold"),
    (["True", "False", "TRUE", "true"], "True", YES),
    (
        ["True", "False", "TRUE", "true"],
        "tru",
        "it holds 'True', 'False', 'TRUE', 'true': write one of these",
    ),
    (["sold", "lost", "sold", "sold"], "sold", YES),
    (
        ["sold", "lost", "sold", "sold"],
        "Sold",
        "it holds 'sold', 'lost': write one of these",
    ),
    (["sold", "lost", "sold", "sold"], "bought", "no row holds 'bought' in sold"),
    ([" sold", "lost", "sold ", "sold"], "sold", YES),
]


@pytest.mark.parametrize(("column", "text", "expected"), COMPARED)
@pytest.mark.parametrize("suffix", ["parquet", "csv"])
@pytest.mark.parametrize("is_equal", [True, False])
def test_a_reward_compares_with_texts_that_are_there(
    tmp_path, column, text, expected, suffix, is_equal
):
    path = tmp_path / f"log.{suffix}"
    if suffix == "csv":
        write_csv(
            path,
            sold=[
                str(value).lower() if isinstance(value, bool) else value
                for value in column
            ],
        )
    else:
        write_parquet(path, sold=column)
    reward = f"10 * (sold {'==' if is_equal else '!='} '{text}')"
    if isinstance(expected, str):
        assert expected in refusal(path, reward=reward)
        return
    log = read(path, reward=reward)
    assert log.rewards.tolist() == (
        expected if is_equal else [10.0 - value for value in expected]
    )


class TestFormulasWithSeveralTexts:
    STATUS = ("sold", "lost", "sold", "Returned")

    def test_a_text_that_is_absent_beside_others_is_a_note(self, tmp_path):
        path = write_csv(tmp_path / "log.csv", status=self.STATUS)
        log = read(path, reward="10 * (status == 'sold') - 5 * (status == 'broken')")
        assert log.rewards.tolist() == [10.0, 0.0, 10.0, 0.0]
        assert any(
            "no row holds 'broken' in status" in note for note in log.metadata.notes
        )

    def test_a_misspelt_text_is_refused_everywhere(self, tmp_path):
        path = write_csv(tmp_path / "log.csv", status=self.STATUS)
        reward = "10 * (status == 'sold') - 5 * (status == 'returned')"
        message = refusal(path, reward=reward)
        assert "no row holds 'returned' in status" in message
        assert "it holds 'Returned'" in message
        # the remedy
        assert (
            read(path, reward=reward.replace("returned", "Returned")).rewards[-1]
            == -5.0
        )
        terminal = "max(t == 1, status == 'returned')"
        assert "no row holds 'returned'" in refusal(path, terminal=terminal)
        assert "no row holds 'returned'" in refusal(path, truncated=terminal)

    def test_two_spellings_in_the_column_are_a_note(self, tmp_path):
        path = write_csv(tmp_path / "log.csv", status=["sold", "Sold", "lost", "lost"])
        log = read(path, reward="1 * (status == 'sold')")
        assert any("status also holds 'Sold'" in note for note in log.metadata.notes)

    def test_an_empty_text_may_be_absent(self, tmp_path):
        path = write_csv(tmp_path / "log.csv", status=self.STATUS)
        assert read(path, reward="2 * (status != '')").rewards.tolist() == [2.0] * 4


# What a column holds with --decimal-comma, and its numbers, or words of the refusal.
DECIMALS = [
    (["1.234", "3,5", "7", "0"], [1234.0, 3.5, 7.0, 0.0]),
    (["1.234,5", "12.345.678", "-3,5", "+1.000"], [1234.5, 12_345_678.0, -3.5, 1000.0]),
    # no comma: points are decimals
    (
        ["0.125", "1.5", "7", "0"],
        [0.125, 1.5, 7.0, 0.0],
    ),
    (["1,5", "NA", "", "2"], [1.5, 9.0, 9.0, 2.0]),
    (["1.5", "3,5", "7", "0"], "row 1 holds '1.5'"),
    (["3,5", "7", "0.125", "0"], "row 3 holds '0.125'"),
    (
        ["1.234", "12.345", "7", "0"],
        "'1.234', a thousand or a number with decimals; write it without the point",
    ),
    (["1,234.5", "3,5", "7", "0"], "row 1 holds '1,234.5'"),
    (["1,234,567", "3,5", "7", "0"], "write 3,5 and 1234 or 1.234"),
    (["oops", "3,5", "7", "0"], "row 1 holds 'oops'; mend it"),
]


@pytest.mark.parametrize(("column", "expected"), DECIMALS)
@pytest.mark.parametrize(
    "role", ["observations", "reward", "several actions", "formula"]
)
def test_one_column_has_one_meaning_of_commas_and_points(
    tmp_path, column, expected, role
):
    path = write_csv(tmp_path / "log.csv", separator=";", u=column)
    changes = {
        "observations": {"observations": ["x", "u"], "impute": {"u": 9.0}},
        "reward": {"reward": "u", "impute": {"u": 9.0}},
        "several actions": {"action": ["u", "dose"]},
        "formula": {"reward": "0 + u", "impute": {"reward": 9.0}},
    }[role]
    if "NA" in column and role == "several actions":
        expected = "values are missing (u: 2"
    if isinstance(expected, str):
        assert expected in refusal(path, decimal_comma=True, **changes)
        return
    log = read(path, decimal_comma=True, **changes)
    numbers = log.rewards
    if role == "observations":
        numbers = log.observations[:, 1]
    elif role == "several actions":
        numbers = log.actions[:, 0]
    assert numbers.tolist() == expected


def test_one_action_with_decimal_commas_is_a_quantity(tmp_path):
    """It was a category for each text."""
    path = write_csv(
        tmp_path / "log.csv", separator=";", a=["0,5", "1.000", "0,25", "1"]
    )
    log = read(path, decimal_comma=True)
    assert log.actions.ravel().tolist() == [0.5, 1000.0, 0.25, 1.0]


def test_the_meaning_is_that_of_the_whole_column(tmp_path):
    """The first comma stands far below, in the second file."""
    rows = 5000
    common = {"a": ["0", "1"] * (rows // 2), "r": ["1"] * rows, "region": ["EU"] * rows}
    common |= {"dose": ["1"] * rows}
    common |= {"t": list(map(str, range(rows))), "done": ["no"] * (rows - 1) + ["yes"]}
    write_csv(tmp_path / "a.csv", ";", x=["1.234"] * rows, e=["b"] * rows, **common)
    write_csv(
        tmp_path / "b.csv",
        ";",
        x=["1.234"] * (rows - 1) + ["3,5"],
        e=["c"] * rows,
        **common,
    )
    log = open_transitions(tmp_path, mapping={**MAPPING, "decimal_comma": True})
    assert set(log.observations.ravel().tolist()) == {1234.0, 3.5}


def test_inspect_proposes_decimal_commas_only_where_they_are_plain(tmp_path):
    path = write_csv(
        tmp_path / "log.csv",
        ";",
        x=["1.234", "3,5", "7", "NA"],
        r=["1,234", "2", "3", "4"],
    )
    inspection = inspect_table(path)
    kinds = {profile.name: profile.kind for profile in inspection.columns}
    assert kinds["x"] == "numbers with decimal commas"
    assert kinds["r"] == "numbers with commas, to be read in two ways"
    assert inspection.mapping["decimal_comma"] is True


def test_a_row_with_too_many_fields_is_found_with_decimal_commas(tmp_path):
    path = write_csv(tmp_path / "log.csv", ";")
    path.write_text(path.read_text() + "1;0;1;d;0;yes;EU;1;9\n", encoding="utf-8")
    assert "more fields than the first line" in refusal(path, decimal_comma=True)


# Labels of four rows, those that are declared, and the labels they are taken for, or
# words of the refusal.
SPELLINGS = [
    (["TRUE", "True", "true", "FALSE"], (), ["true", "true", "true", "false"]),
    (
        ["TRUE", "True", "true", "False"],
        ("True", "False"),
        ["True", "True", "True", "False"],
    ),
    (["True", "False", "True", "False"], (), ["True", "False", "True", "False"]),
    (
        ["TRUE", "true", "FALSE", "true"],
        ("TRUE", "true", "FALSE"),
        ["TRUE", "true", "FALSE", "true"],
    ),
    (
        ["mail", "Mail", "call", "MAIL"],
        ("call", "mail"),
        ["mail", "mail", "call", "mail"],
    ),
    (
        ["mail", "Mail", "call", "mail"],
        ("call", "mail", "Mail"),
        ["mail", "Mail", "call", "mail"],
    ),
    (["mail", "Mail", "call", "mail"], (), "holds 'Mail', 'mail': one "),
    (["stra\u00dfe", "STRASSE", "weg", "weg"], (), "one "),
    (["caf\u00e9", "cafe\u0301", "weg", "weg"], (), "one "),
    (["mail ", "mail", "call", "call"], (), "holds 'mail', 'mail ': one "),
]


@pytest.mark.parametrize(("column", "declared", "expected"), SPELLINGS)
@pytest.mark.parametrize("suffix", ["parquet", "csv"])
class TestSpellings:
    def path(self, folder, suffix, **columns):
        if suffix == "csv":
            if any(
                text != text.strip() for column in columns.values() for text in column
            ):
                pytest.skip("blanks around fields of a CSV file are no part of them")
            return write_csv(folder / "log.csv", **columns)
        return write_parquet(folder / "log.parquet", **columns)

    def test_of_actions(self, tmp_path, column, declared, expected, suffix):
        path = self.path(tmp_path, suffix, a=column)
        if isinstance(expected, str):
            message = refusal(path)
            assert expected + "action, or several?" in message
            every = sorted(set(column))  # the two remedies
            assert len(set(read(path, action_names=every).actions.tolist())) == len(
                every
            )
            distinct = [
                label
                for label in every
                if label not in ("Mail", "STRASSE", "caf\u00e9", "mail ")
            ]
            assert len(set(read(path, action_names=distinct).actions.tolist())) == len(
                distinct
            )
            return
        log = read(path, action_names=declared)
        names = log.metadata.extra["action_names"]
        assert [names[action] for action in log.actions] == expected
        is_noted = any("were taken for one" in note for note in log.metadata.notes)
        assert is_noted == (expected != column)

    def test_of_categories(self, tmp_path, column, declared, expected, suffix):
        path = self.path(tmp_path, suffix, region=column)
        encoding = {"one-hot": list(declared)} if declared else "one-hot"
        changes = {"observations": ["x", "region"], "encode": {"region": encoding}}
        if declared:
            changes["encode"] = {"region": {"ordinal": list(declared)}}
        if isinstance(expected, str):
            assert expected + "category, or several?" in refusal(path, **changes)
            return
        log = read(path, **changes)
        features = open_raw(path, None, {**MAPPING, **changes}).metadata
        assert features.notes == log.metadata.notes
        if declared:
            assert [declared[int(code)] for code in log.observations[:, 1]] == expected
        else:
            names = sorted(set(expected))
            assert log.feature_names[1:] == tuple(f"region={name}" for name in names)
            ones = log.observations[:, 1:].argmax(axis=1)
            assert [names[i] for i in ones] == expected

    def test_of_groups(self, tmp_path, column, declared, expected, suffix):
        """Nothing declares groups: true and false are two labels, and others may be
        different ones.
        """
        path = self.path(
            tmp_path, suffix, region=column, e=["b", "c", "d", "f"], done=["yes"] * 4
        )
        raw = open_raw(path, None, {**MAPPING, "by": "region"})
        is_noted = any("case or blanks alone" in note for note in raw.metadata.notes)
        assert is_noted == (column != ["True", "False", "True", "False"])
        if "true" in column:
            assert raw.labels.tolist() == [text.lower() for text in column]
        else:
            assert raw.labels.tolist() == column


def test_inspect_proposes_each_action_once(tmp_path):
    rows = {name: column * 10 for name, column in ROWS.items()}
    rows["t"] = list(map(str, range(40)))
    rows["a"] = ["TRUE", "True", "true", "false"] * 10
    rows["done"] = ["TRUE", "True", "False", "false"] * 10
    inspection = inspect_table(write_csv(tmp_path / "log.csv", **rows))
    assert inspection.mapping["action_names"] == ["false", "true"]
    assert inspection.mapping["terminal"] == "done"
    rows["a"] = ["mail", "Mail", "call", "call"] * 10
    inspection = inspect_table(write_csv(tmp_path / "log.csv", **rows))
    assert any(
        "'Mail', 'mail' are one action, or several?" in problem
        for problem in inspection.problems
    )
