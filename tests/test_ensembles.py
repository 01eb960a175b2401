"""A user's predictions: every form reads the same, and what is wrong is told by file and input."""

import numpy as np
import pandas as pd
import pytest
from scipy import special

from paperlib import ensembles, policy

MEMBERS, INPUTS, CLASSES = 4, 30, 3
NAMES = ("cat", "dog", "eel")


@pytest.fixture
def logits():
    return np.random.default_rng(0).normal(size=(MEMBERS, INPUTS, CLASSES)) * 2


@pytest.fixture
def probs(logits):
    return special.softmax(logits, axis=-1)


IDS = np.array([f"x{i:02d}" for i in range(INPUTS)])
LABELS = np.arange(INPUTS) % CLASSES


def whole(ensemble):
    return np.concatenate([ensemble.read(rows) for rows in ensemble.blocks], axis=1)


def write_members(folder, probs, ending, shuffle=True):
    """One table a member, all but the first with its rows in another order."""
    rng = np.random.default_rng(1)
    paths = []
    for member, values in enumerate(probs):
        table = pd.DataFrame(values, columns=NAMES)
        table.insert(0, "id", IDS[: len(values)])
        if member and shuffle:
            table = table.iloc[rng.permutation(len(table))]
        paths.append(folder / f"member_{member}{ending}")
        table.to_csv(paths[-1], index=False) if ending == ".csv" else table.to_parquet(paths[-1])
    return paths


@pytest.mark.parametrize(
    "form", ["npz", "npz_compressed", "npz_other_name", "npy", "npy_fortran", "npys", ".csv", ".parquet"]
)
def test_every_form_reads_the_same_values(tmp_path, probs, form, monkeypatch):
    monkeypatch.setattr(ensembles, "BLOCK_VALUES", 7 * MEMBERS * CLASSES)
    path = tmp_path / "all.npz"
    if form == "npz":
        np.savez(path, labels=LABELS, probs=probs)
    elif form == "npz_compressed":
        np.savez_compressed(path, probs=probs, labels=LABELS)
    elif form == "npz_other_name":
        np.savez(path, softmax=probs)
    elif form in ("npy", "npy_fortran"):
        path = tmp_path / "all.npy"
        np.save(path, probs if form == "npy" else np.asfortranarray(probs))
    elif form == "npys":
        path = [tmp_path / f"{member}.npy" for member in range(MEMBERS)]
        for file, values in zip(path, probs, strict=True):
            np.save(file, values)
    else:
        path = write_members(tmp_path, probs, form)
    ensemble = ensembles.read(path)
    assert ensemble.kind == "probs"
    assert ensemble.shape == probs.shape
    assert len(ensemble.blocks) == 5
    assert np.array_equal(whole(ensemble), probs)


@pytest.mark.parametrize("kind", ensembles.KINDS)
def test_kind_is_recognised_and_told(probs, logits, kind):
    values = {"probs": probs, "log_probs": np.log(probs), "logits": logits}[kind]
    ensemble = ensembles.from_arrays(values.astype(np.float32))
    assert ensemble.kind == kind
    assert f"{kind} (recognised from the values)" in ensemble.notes[0]


def test_one_bad_input_does_not_make_probabilities_logits(probs):
    probs[1, 3, 2] = np.nan
    assert ensembles.from_arrays(probs).kind == "probs"


def test_positive_numbers_that_sum_to_anything_must_be_named(probs):
    with pytest.raises(ensembles.EnsembleError, match="--kind"):
        ensembles.from_arrays(100 * probs)
    assert ensembles.from_arrays(100 * probs, kind="logits").kind == "logits"


def test_name_in_the_npz_and_the_users_word_come_before_recognition(tmp_path, logits):
    np.savez(tmp_path / "a.npz", logits=logits - 100)
    assert ensembles.read(tmp_path / "a.npz").kind == "logits"
    assert ensembles.read(tmp_path / "a.npz", kind="log_probs").kind == "log_probs"
    assert ensembles.read(tmp_path / "a.npz", default_kind="probs").kind == "logits"


@pytest.mark.parametrize(
    "labels",
    [
        LABELS,
        LABELS.astype(float),
        np.array(NAMES)[LABELS],
        LABELS.astype(str),
        np.array(NAMES, dtype=object)[LABELS],
    ],
)
def test_labels_as_indices_or_names(probs, labels):
    assert np.array_equal(ensembles.from_arrays(probs, labels=labels, class_names=NAMES).labels, LABELS)


@pytest.mark.parametrize("missing", [-1, np.nan, "", None, "-1"])
def test_missing_labels(probs, missing):
    labels = LABELS.astype(object) if missing is None or isinstance(missing, str) else LABELS.astype(float)
    labels[4] = missing
    found = ensembles.from_arrays(probs, labels=labels, class_names=NAMES).labels
    assert found[4] == -1
    assert np.array_equal(np.delete(found, 4), np.delete(LABELS, 4))


@pytest.mark.parametrize("bad", [3, -2, 1.5, "fox"])
def test_labels_that_are_no_class_are_told_by_input(probs, bad):
    labels = LABELS.astype(object if isinstance(bad, str) else float)
    labels[5] = bad
    with pytest.raises(ensembles.EnsembleError, match="input 5"):
        ensembles.from_arrays(probs, labels=labels, class_names=NAMES)


def test_split_as_words_or_as_a_mask(probs):
    mask = np.arange(INPUTS) < 20
    for split in (mask, mask.astype(int), np.where(mask, "calibration", "Test")):
        ensemble = ensembles.from_arrays(probs, split=split)
        assert np.array_equal(ensemble.calibration, mask)
        assert np.array_equal(ensemble.test, ~mask)
    with pytest.raises(ensembles.EnsembleError, match="'train' of input 0"):
        ensembles.from_arrays(probs, split=["train"] * INPUTS)


def test_labels_of_a_side_table_are_matched_by_id(tmp_path, probs):
    paths = write_members(tmp_path, probs, ".csv")
    order = np.random.default_rng(2).permutation(INPUTS)
    pd.DataFrame({"id": IDS[order], "label": np.array(NAMES)[LABELS][order]}).to_csv(tmp_path / "y.csv", index=False)
    ensemble = ensembles.read(paths, labels=tmp_path / "y.csv")
    assert np.array_equal(ensemble.labels, LABELS)
    assert ensemble.class_names == NAMES
    assert np.array_equal(ensemble.ids, IDS)


def test_label_and_split_columns_of_the_first_table(tmp_path, probs):
    paths = write_members(tmp_path, probs, ".csv")
    table = pd.read_csv(paths[0])
    table["label"], table["split"] = LABELS, np.where(np.arange(INPUTS) < 20, "calibration", "test")
    table.to_csv(paths[0], index=False)
    ensemble = ensembles.read(paths)
    assert np.array_equal(ensemble.labels, LABELS)
    assert ensemble.calibration.sum() == 20
    # A file comes before the column of that name, which is no class either way.
    np.save(tmp_path / "y.npy", LABELS[::-1])
    ensemble = ensembles.read(paths, labels=tmp_path / "y.npy")
    assert np.array_equal(ensemble.labels, LABELS[::-1])
    assert ensemble.class_names == NAMES
    table.rename(columns={"label": "truth"}).to_csv(paths[0], index=False)
    assert np.array_equal(ensembles.read(paths, labels="truth").labels, LABELS)


# ------------------------------------------------------------------------------------------- what is wrong, and where


@pytest.mark.parametrize("value, words", [(np.nan, "nan is none of probs"), (-0.2, "-0.2 is none"), (0.9, "not to 1")])
@pytest.mark.parametrize("estimator", ["mom", "mle"])
def test_bad_values_are_told_by_file_input_and_id(tmp_path, probs, value, words, estimator, monkeypatch):
    monkeypatch.setattr(ensembles, "BLOCK_VALUES", 7 * MEMBERS * CLASSES)
    probs[2, 17, 1] = value
    probs[2, 17, 0] += 0.5 if value == 0.9 else 0
    paths = [tmp_path / f"{member}.npy" for member in range(MEMBERS)]
    for path, values in zip(paths, probs, strict=True):
        np.save(path, values)
    np.save(tmp_path / "ids.npy", IDS)
    ensemble = ensembles.read(paths, ids=tmp_path / "ids.npy")
    with pytest.raises(ensembles.EnsembleError, match=words) as error:
        policy.fit(ensemble, estimator=estimator)
    assert f"{tmp_path}/2.npy, input 17 (counted from 0; id x17)" in str(error.value)


@pytest.mark.parametrize(
    "kind, value", [("logits", np.nan), ("logits", np.inf), ("log_probs", np.nan), ("log_probs", 0.5)]
)
def test_bad_logits_and_logarithms(logits, kind, value):
    values = logits if kind == "logits" else special.log_softmax(logits, axis=-1)
    values[0, 2, 1] = value
    with pytest.raises(ensembles.EnsembleError, match=r"input 2 .*class 1"):
        policy.fit(ensembles.from_arrays(values, kind=kind))


def test_a_logit_of_minus_infinity_is_a_probability_of_zero(logits):
    logits[:, 2, 1] = -np.inf
    decisions = policy.fit(ensembles.from_arrays(logits, kind="logits")).decisions
    assert decisions.mean[2, 1] == 0
    logits[0, 2] = -np.inf
    with pytest.raises(ensembles.EnsembleError, match="input 2"):
        policy.fit(ensembles.from_arrays(logits, kind="logits"))


def test_members_that_do_not_match(tmp_path, probs):
    paths = write_members(tmp_path, probs, ".csv")
    table = pd.read_csv(paths[2])

    def refused(changed, words):
        changed.to_csv(paths[2], index=False)
        with pytest.raises(ensembles.EnsembleError, match=words) as error:
            ensembles.read(paths)
        assert "member_2.csv" in str(error.value)

    refused(table[table["id"] != "x07"], "no row for id x07")
    refused(pd.concat([table, table.iloc[:1].assign(id="new")]), "no row for id new")
    refused(pd.concat([table, table.iloc[:1]]), "more than once")
    refused(table[["id", "dog", "cat", "eel"]], "name and order")
    refused(table.drop(columns="eel"), "class columns")
    refused(table.drop(columns="id"), "id column")
    refused(table.astype({"dog": object}).replace({"dog": {table["dog"][3]: "oops"}}), "row 4 of the data.*'oops'")
    table.loc[3, "dog"] = np.nan
    refused(table, "row 4 of the data.*column dog: an empty cell")


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"values": np.full((1, 5, 3), 1 / 3)}, "at least 2"),
        ({"values": np.full((5, 3), 1 / 3)}, "members, inputs, classes"),
        ({"values": np.full((3, 0, 3), 1 / 3)}, "at least 2"),
        ({"values": np.full((2, 5, 2), "a")}, "real numbers"),
        ({"values": np.full((2, 5, 2), 0.5), "labels": [0, 1]}, "one each"),
        ({"values": np.full((2, 2, 2), 0.5), "ids": ["a", "a"]}, "id a is there more than once"),
        ({"values": np.full((2, 2, 2), 0.5), "class_names": ["a", "a"]}, "class names"),
    ],
)
def test_arrays_of_the_wrong_shape(arguments, words):
    with pytest.raises(ensembles.EnsembleError, match=words):
        ensembles.from_arrays(**arguments)


def test_files_that_are_no_predictions(tmp_path, probs):
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "text.npy").write_text("hello")
    (tmp_path / "a.txt").write_text("hello")
    np.savez(tmp_path / "two.npz", probs=probs, logits=probs)
    np.savez(tmp_path / "objects.npz", probs=probs, ids=IDS.astype(object))
    np.savez(tmp_path / "good.npz", probs=probs)
    whole_file = (tmp_path / "good.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole_file[: len(whole_file) // 2])
    for name in ("text.npz", "text.npy", "a.txt", "two.npz", "objects.npz", "cut.npz", "missing.npy"):
        with pytest.raises(ensembles.EnsembleError):
            ensembles.read(tmp_path / name)
    with pytest.raises(ensembles.EnsembleError, match="neither an array"):
        ensembles.read(tmp_path / "good.npz", labels="truth")


# ------------------------------------------------------------------------------------------- writing


def test_table_is_written_in_blocks_and_reads_back_exactly(tmp_path, probs, monkeypatch):
    monkeypatch.setattr(ensembles, "ROWS_WRITTEN_AT_ONCE", 7)
    ids = np.array([f'a "{i}", b' for i in range(INPUTS)])
    ensemble = ensembles.from_arrays(probs, labels=LABELS, ids=ids, class_names=NAMES)
    decisions = policy.fit(ensemble, order="entropy").decisions
    ensembles.write_table(tmp_path, ensemble, decisions)
    expected = ensembles.table(ensemble, decisions)
    assert list(expected.columns) == [
        *("id", "label", "predicted", "confidence", "alpha_0", "total_variance", "mutual_information", "entropy"),
        *("flags", "decision", "p_cat", "p_dog", "p_eel"),
    ]
    for found in (
        pd.read_parquet(tmp_path / "inputs.parquet"),
        pd.read_csv(tmp_path / "inputs.csv", keep_default_na=False),
    ):
        pd.testing.assert_frame_equal(found, expected, check_dtype=False, check_exact=True)


def test_output_is_all_or_nothing(tmp_path):
    out = tmp_path / "deep" / "out"
    for content in ("first", "second"):
        with ensembles.output_folder(out) as folder:
            (folder / "policy.json").write_text(content)
            assert not (out / "policy.json").exists() or (out / "policy.json").read_text() == "first"
        assert (out / "policy.json").read_text() == content
    with pytest.raises(RuntimeError), ensembles.output_folder(out) as folder:
        (folder / "policy.json").write_text("third")
        raise RuntimeError
    assert (out / "policy.json").read_text() == "second"
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ensembles.EnsembleError, match=r"thesis\.tex"), ensembles.output_folder(tmp_path):
        pass
    assert (tmp_path / "thesis.tex").exists()
