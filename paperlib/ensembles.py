"""A user's own ensemble: predictions read from any of the forms of docs/own-ensemble.md, and the table written.

Nothing is held but what a block of inputs needs: arrays stay on disk and are mapped for one block at a time, tables
are converted member by member to such arrays in a temporary folder.
"""

import os
import shutil
import tempfile
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from paperlib import checks
from paperlib.errors import UserError

KINDS = ("probs", "log_probs", "logits")
PARTS = ("calibration", "test")
TABLES = (".csv", ".parquet")
SPECIAL_COLUMNS = {"ids": "id", "labels": "label", "split": "split"}
OUTPUTS = ("inputs.csv", "inputs.parquet", "policy.json", "report.html")
# Numbers held at a time: a block of inputs is that many divided by members x classes.
BLOCK_VALUES = 2**22
ROWS_WRITTEN_AT_ONCE = 2**16
# Inputs of each member looked at to recognise what the numbers are.
LOOKED_AT = 1000


class EnsembleError(UserError):
    """Predictions that cannot be used; the message names the file and the input, and says what to do."""


@dataclass(frozen=True)
class _OnDisk:
    """An array in a file, mapped anew for every read: pages of the last block do not stay in memory."""

    path: Path
    dtype: np.dtype
    shape: tuple
    offset: int
    order: str

    def read(self, rows):
        return np.memmap(self.path, self.dtype, "r", self.offset, self.shape, self.order)[..., rows, :]


@dataclass(frozen=True)
class _InMemory:
    array: np.ndarray

    @property
    def dtype(self):
        return self.array.dtype

    @property
    def shape(self):
        return self.array.shape

    def read(self, rows):
        return self.array[..., rows, :]


@dataclass(frozen=True)
class Ensemble:
    """Predictions of M members for N inputs and K classes, and what is known of the inputs.

    labels (N,) hold -1 where there is none; labels, calibration and test are None where nothing was said. notes tell
    what was recognised, for the user to check.
    """

    sources: tuple
    files: tuple
    shape: tuple
    kind: str
    ids: np.ndarray
    class_names: tuple
    classes_are_named: bool
    labels: np.ndarray | None = None
    calibration: np.ndarray | None = None
    test: np.ndarray | None = None
    notes: tuple = ()
    folder: tempfile.TemporaryDirectory | None = field(default=None, repr=False)

    @property
    def dtype(self):
        """The type that holds the numbers of all members."""
        return np.result_type(*(source.dtype for source in self.sources))

    @property
    def blocks(self):
        """Slices of inputs to read one after the other."""
        members, inputs, classes = self.shape
        size = max(1, BLOCK_VALUES // (members * classes))
        return [slice(start, min(start + size, inputs)) for start in range(0, inputs, size)]

    def read(self, rows):
        """Values (M, n, K) of a slice of inputs, as they are stored."""
        if len(self.sources) == 1:
            return np.array(self.sources[0].read(rows))
        values = np.empty((self.shape[0], rows.stop - rows.start, self.shape[2]), self.dtype)
        for member, source in enumerate(self.sources):
            values[member] = source.read(rows)
        return values

    def first_problem(self, rows, values):
        """The EnsembleError that says which value of a block is no prediction; None if all are."""
        values = values.astype(np.float64)
        if self.kind == "probs":
            sums, bad = values.sum(axis=-1), ~np.isfinite(values) | (values < 0)
        elif self.kind == "log_probs":
            sums, bad = np.exp(values).sum(axis=-1), np.isnan(values) | (values > checks.SUM_TOLERANCE)
        else:
            sums, bad = np.isfinite(values).any(axis=-1), np.isnan(values) | np.isposinf(values)
        no_sum = ~bad.any(axis=-1) & ~(np.abs(sums - 1) <= checks.SUM_TOLERANCE)
        if not (bad.any() or no_sum.any()):
            return None
        member, row, *column = (int(i) for i in np.argwhere(bad if bad.any() else no_sum)[0])
        what = f"{self.files[member]}, {self.describe_input(rows.start + row)}"
        if column:
            name = self.class_names[column[0]]
            return EnsembleError(
                f"{what}, class {name}: {values[member, row, column[0]]} is none of {self.kind}. "
                "Mend or leave out that input in all members, or say what the numbers are with --kind"
            )
        return EnsembleError(
            f"{what}: the {self.kind} of the classes sum to {sums[member, row]:.6g}, not to 1. "
            "Say --kind logits if the numbers are not normalised"
        )

    def describe_input(self, index):
        return f"input {index} (counted from 0; id {self.ids[index]})"


# ------------------------------------------------------------------------------------------- reading


def from_arrays(values, kind=None, labels=None, split=None, ids=None, class_names=None, name="predictions"):
    """Ensemble of an array (M, N, K); labels, split, ids and class_names as in an .npz file."""
    return _assemble([_InMemory(np.asarray(values))], [name], kind, labels, split, ids, class_names, [])


def read(paths, kind=None, labels=None, split=None, ids=None, class_names=None, default_kind=None):
    """Ensemble from one .npz or .npy of shape (M, N, K), or from one .npy, .csv or .parquet a member.

    labels, split and ids name an array of the .npz, a column of the tables or a file; class_names are names, or a
    file with one a line. Where neither kind nor the name of an array in the .npz says what the numbers are,
    default_kind does, else it is recognised.
    """
    paths = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    for path in paths:
        if not path.is_file():
            raise EnsembleError(f"{path} is not there (or is no file)")
    endings = {path.suffix.lower() for path in paths}
    unknown = endings - {".npz", ".npy", *TABLES}
    if unknown:
        raise EnsembleError(f"cannot read {', '.join(sorted(unknown))} files; use .npz, .npy, .csv or .parquet")
    if ".npz" in endings and len(paths) > 1:
        raise EnsembleError("give one .npz with all members, or one .npy, .csv or .parquet a member")
    folder, notes, known = tempfile.TemporaryDirectory(prefix="paperlib-"), [], {}
    if endings == {".npz"}:
        sources, found_kind, known = _read_npz(paths[0], kind, labels, split, ids, folder.name, notes)
        kind = kind or found_kind
    elif endings <= set(TABLES):
        sources, known = _read_tables(paths, labels, split, ids, folder.name)
    elif endings == {".npy"}:
        sources = [_npy(path) for path in paths]
    else:
        raise EnsembleError("members in tables (.csv, .parquet) and in arrays (.npy) cannot be mixed")
    ids = known.get("ids") if known.get("ids") is not None else _side_file(ids, "id", None)
    labels = known.get("labels") if known.get("labels") is not None else _side_file(labels, "label", ids)
    split = known.get("split") if known.get("split") is not None else _side_file(split, "split", ids)
    said_by = "as said" if kind else "as the policy says"
    names = _class_names(class_names) if class_names is not None else known.get("class_names")
    files = [str(path) for path in paths]
    return _assemble(sources, files, kind or default_kind, labels, split, ids, names, notes, folder, said_by)


def _npy(path):
    try:
        mapped = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise EnsembleError(f"{path} cannot be read ({error}); write it with numpy.save") from None
    return _OnDisk(path, mapped.dtype, mapped.shape, mapped.offset, "C" if mapped.flags.c_contiguous else "F")


def _read_npz(path, kind, labels, split, ids, folder, notes):
    try:
        archive = np.load(path, allow_pickle=False)
    except (zipfile.BadZipFile, EOFError, ValueError, OSError) as error:
        raise EnsembleError(f"{path} cannot be read ({error}); write it with numpy.savez") from None
    with archive:
        keys = {"labels": labels, "split": split, "ids": ids, "class_names": None}
        known = {}
        for name, asked in keys.items():
            key = asked if asked in archive.files else name
            if key in archive.files and (asked is None or asked == key):
                known[name] = _npz_array(archive, key, path)
        cubes = [name for name in KINDS if name in archive.files] or [
            name for name in archive.files if name not in keys and name not in keys.values()
        ]
        if kind in cubes:
            cubes = [kind]
        if len(cubes) != 1:
            raise EnsembleError(
                f"{path} must hold the predictions as one of {', '.join(KINDS)} (members, inputs, classes); "
                f"it holds {', '.join(archive.files) or 'nothing'}"
            )
        used = {cubes[0], *keys, *(value for value in keys.values() if value)}
        ignored = [name for name in archive.files if name not in used]
        if ignored:
            notes.append(f"ignored arrays of {path.name}: {', '.join(ignored)}")
    return [_npz_on_disk(path, cubes[0], folder)], cubes[0] if cubes[0] in KINDS else None, known


def _npz_array(archive, key, path):
    try:
        return archive[key]
    except ValueError as error:
        raise EnsembleError(f"{path}: array {key} cannot be read ({error}); store text with dtype=str") from None


def _npz_on_disk(path, key, folder):
    """An array of an .npz: mapped where it lies if stored plainly, else unpacked to the temporary folder."""
    with zipfile.ZipFile(path) as archive:
        entry = archive.getinfo(f"{key}.npy")
        if entry.compress_type != zipfile.ZIP_STORED:
            try:
                return _npy(Path(archive.extract(entry, folder)))
            except (zipfile.BadZipFile, OSError) as error:
                raise EnsembleError(f"{path} could not be unpacked to {folder}: {error}") from None
    with path.open("rb") as file:
        file.seek(entry.header_offset + 26)
        name_length, extra_length = np.frombuffer(file.read(4), "<u2")
        file.seek(int(name_length) + int(extra_length), os.SEEK_CUR)
        version = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = header(file)
        return _OnDisk(path, dtype, shape, file.tell(), "F" if fortran else "C")


def _read_table(path, text_columns):
    try:
        if path.suffix.lower() == ".csv":
            return pd.read_csv(path, dtype=dict.fromkeys(text_columns, str), keep_default_na=True)
        return pd.read_parquet(path)
    except (ValueError, OSError, pd.errors.ParserError) as error:
        raise EnsembleError(f"{path} cannot be read: {error}") from None


def _read_tables(paths, labels, split, ids, folder):
    """Members as float arrays on disk in the order of the first file, and what the first file says of the inputs."""
    asked, special = {"ids": ids, "labels": labels, "split": split}, dict(SPECIAL_COLUMNS)
    sources, known, columns = [], {}, None
    for number, path in enumerate(paths):
        table = _read_table(path, [*special.values(), *filter(None, asked.values())])
        if number == 0:
            special |= {what: name for what, name in asked.items() if name in table}
        found = [name for name in table.columns if name not in special.values()]
        id_column = table[special["ids"]].astype(str).to_numpy(str) if special["ids"] in table else None
        if number == 0:
            columns = found
            known = {
                what: table[name].to_numpy()
                for what, name in special.items()
                if name in table and asked[what] in (None, name)
            }
            known |= {"ids": id_column, "class_names": np.array(columns, str)}
        if found != columns:
            raise EnsembleError(
                f"{path} has the class columns {', '.join(map(str, found))}, but {paths[0]} has "
                f"{', '.join(map(str, columns))}; name and order must be the same in all members"
            )
        values = _numeric(table[found], path, id_column)
        if number and (id_column is None) != (known["ids"] is None):
            raise EnsembleError(f"{path} and {paths[0]}: only one of them has the id column {special['ids']!r}")
        if number and id_column is not None:
            values = values[_matched(id_column, known["ids"], path, paths[0])]
        file = Path(folder) / f"member_{number}.npy"
        np.save(file, values)
        sources.append(_npy(file))
    return sources, known


def _numeric(columns, path, ids):
    numbers = columns.apply(pd.to_numeric, errors="coerce")
    values = numbers.to_numpy(np.result_type(np.float32, *numbers.dtypes) if len(numbers.columns) else float)
    bad = np.isnan(values)
    if bad.any():
        row, column = (int(i) for i in np.argwhere(bad)[0])
        name = f" (id {ids[row]})" if ids is not None else ""
        cell = columns.iloc[row, column]
        found = "an empty cell" if pd.isna(cell) else repr(cell)
        raise EnsembleError(
            f"{path}, row {row + 1} of the data{name}, column {columns.columns[column]}: {found} is no number"
        )
    return values


def _matched(ids, expected, path, first):
    """Rows of path in the order of the first file's ids."""
    if np.array_equal(ids, expected):
        return slice(None)
    found, wanted = pd.Index(ids), pd.Index(expected)
    for index, file in ((found, path), (wanted, first)):
        if not index.is_unique:
            raise EnsembleError(f"{file}: id {index[index.duplicated()][0]} is there more than once")
    for missing, file, other in (
        (wanted.difference(found, sort=False), path, first),
        (found.difference(wanted, sort=False), first, path),
    ):
        if len(missing):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise EnsembleError(f"{file} has no row for id {missing[0]}{more}, but {other} has")
    return found.get_indexer(wanted)


def _side_file(source, column, ids):
    """An array from a file that goes beside the predictions; tables with ids are matched by them."""
    if source is None or not isinstance(source, str | Path):
        return source
    path = Path(source)
    if not path.is_file():
        raise EnsembleError(f"{source}: neither an array or column of the predictions nor a file")
    if path.suffix.lower() == ".npy":
        try:
            return np.load(path, allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise EnsembleError(f"{path} cannot be read ({error}); store text with dtype=str") from None
    if path.suffix.lower() not in TABLES:
        raise EnsembleError(f"{path}: use .npy, .csv or .parquet")
    table = _read_table(path, ["id", "label", "split"])
    others = [name for name in table.columns if name != "id"]
    name = column if column in table else others[0] if len(others) == 1 else None
    if name is None:
        raise EnsembleError(f"{path} has no column {column!r}; it has {', '.join(map(str, table.columns))}")
    values = table[name].to_numpy()
    if "id" in table and column != "id" and ids is not None:
        values = values[
            _matched(table["id"].astype(str).to_numpy(str), np.asarray(ids).astype(str), path, "the predictions")
        ]
    return values


def _class_names(given):
    if isinstance(given, str | Path):
        path = Path(given)
        given = path.read_text().splitlines() if path.is_file() else str(given).split(",")
    return [str(name).strip() for name in given if str(name).strip()]


def _assemble(sources, files, kind, labels, split, ids, class_names, notes, folder=None, said_by="as said"):
    shape, files = _shape(sources, files)
    members, inputs, classes = shape
    for name, given in (("labels", labels), ("split", split), ("ids", ids)):
        if given is not None and np.shape(given) != (inputs,):
            raise EnsembleError(
                f"{name} have the shape {np.shape(given)}, but there are {inputs} inputs: one each is needed"
            )
    if ids is None:
        ids = np.arange(inputs)
    else:
        index = pd.Index(np.asarray(ids))
        if not index.is_unique:
            raise EnsembleError(f"{files[0]}: id {index[index.duplicated()][0]} is there more than once")
        ids = index.to_numpy() if index.dtype.kind == "i" else index.to_numpy().astype(str)
    named = class_names is not None
    class_names = tuple(str(name) for name in class_names) if named else tuple(map(str, range(classes)))
    if len(class_names) != classes or len(set(class_names)) != classes:
        raise EnsembleError(f"{len(set(class_names))} different class names for {classes} classes")
    said = said_by if kind else "recognised from the values"
    kind = checks.choice("kind", kind, KINDS) if kind else _recognised(sources, files)
    notes = [
        f"{members} members, {inputs:,} inputs, {classes} classes; {kind} ({said}), {sources[0].dtype}",
        *notes,
    ]
    if labels is not None:
        labels = _label_indices(labels, class_names)
        notes.append(f"labels of {np.count_nonzero(labels >= 0):,} inputs")
    calibration, test = (None, None) if split is None else _parts(split)
    if split is not None:
        notes.append(f"split: {calibration.sum():,} inputs for calibration, {test.sum():,} for test")
    return Ensemble(
        tuple(sources), files, shape, kind, ids, class_names, named, labels, calibration, test, tuple(notes), folder
    )


def _shape(sources, files):
    for source, file in zip(sources, files, strict=True):
        if not np.issubdtype(source.dtype, np.floating) and not np.issubdtype(source.dtype, np.integer):
            raise EnsembleError(f"{file} holds {source.dtype}, not real numbers")
    if len(sources) == 1:
        if len(sources[0].shape) != 3:
            raise EnsembleError(
                f"{files[0]} has the shape {sources[0].shape}; one file needs (members, inputs, classes), "
                "and (inputs, classes) needs one file for each of at least 2 members"
            )
        shape = sources[0].shape
        files = tuple(f"{files[0]}, member {member}" for member in range(shape[0]))
    else:
        for source, file in zip(sources, files, strict=True):
            if len(source.shape) != 2:
                raise EnsembleError(f"{file} has the shape {source.shape}; one file a member needs (inputs, classes)")
            if source.shape != sources[0].shape:
                raise EnsembleError(
                    f"{file} has {source.shape[0]} inputs and {source.shape[1]} classes, but {files[0]} has "
                    f"{sources[0].shape[0]} and {sources[0].shape[1]}"
                )
        shape = (len(sources), *sources[0].shape)
    if shape[0] < 2 or shape[1] < 1 or shape[2] < 2:
        raise EnsembleError(
            f"{files[0] if files else 'the file'}: {shape} members, inputs, classes; at least 2, 1, 2 are needed"
        )
    return tuple(int(size) for size in shape), tuple(files)


def _recognised(sources, files):
    """What the numbers are, by most of the first inputs of each member: a few bad ones are told later, by name."""
    values = np.concatenate(
        [source.read(slice(0, LOOKED_AT)).reshape(-1, source.shape[-1]) for source in sources]
    ).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        probs = (values >= 0).all(axis=-1) & (np.abs(values.sum(axis=-1) - 1) <= checks.SUM_TOLERANCE)
        logs = (values <= checks.SUM_TOLERANCE).all(axis=-1) & (
            np.abs(np.exp(values).sum(axis=-1) - 1) <= checks.SUM_TOLERANCE
        )
    if probs.mean() > 0.5:
        return "probs"
    if logs.mean() > 0.5:
        return "log_probs"
    if np.nanmin(values, initial=0) >= 0:
        raise EnsembleError(
            f"{files[0]}: the numbers are not negative, but do not sum to 1; say what they are with --kind "
            f"({', '.join(KINDS)}), or divide percentages by 100"
        )
    return "logits"


def _label_indices(labels, class_names):
    labels = np.asarray(labels)
    if labels.dtype.kind in "iufb":
        numbers = np.where(np.isnan(labels.astype(float)), -1, labels).astype(float)
        bad = (numbers != np.rint(numbers)) | (numbers < -1) | (numbers >= len(class_names))
    else:
        index = {name: number for number, name in enumerate(class_names)}
        index |= {str(number): number for number in range(-1, len(class_names)) if str(number) not in index}
        text = pd.Series(labels, dtype=object)
        text = text.mask(text.isna() | (text == ""), "-1").astype(str)
        numbers = text.map(index).to_numpy(float)
        bad = np.isnan(numbers)
    if bad.any():
        row = int(np.argmax(bad))
        raise EnsembleError(
            f"label {str(labels[row])!r} of input {row} (counted from 0) is no class: 0..{len(class_names) - 1}, "
            "-1 for none, or a class name"
        )
    return numbers.astype(np.int64)


def _parts(split):
    split = np.asarray(split)
    if split.dtype == bool or (split.dtype.kind in "iu" and np.isin(split, (0, 1)).all()):
        return split.astype(bool), ~split.astype(bool)
    text = pd.Series(split, dtype=object)
    text = text.mask(text.isna(), "").astype(str).str.strip().str.lower().to_numpy(str)
    bad = ~np.isin(text, (*PARTS, ""))
    if bad.any():
        row = int(np.argmax(bad))
        raise EnsembleError(
            f"split {str(split[row])!r} of input {row} (counted from 0): use calibration, test or nothing, "
            "or a mask that is true for calibration"
        )
    return text == "calibration", text == "test"


# ------------------------------------------------------------------------------------------- writing


def table(ensemble, decisions, rows=slice(None)):
    """Table of some inputs: id, what is known, prediction, Dirichlet, uncertainties, flags, decision, means."""
    names = np.array(ensemble.class_names)
    columns = {"id": ensemble.ids[rows]}
    if ensemble.calibration is not None:
        columns["split"] = np.select([ensemble.calibration[rows], ensemble.test[rows]], PARTS, "")
    if ensemble.labels is not None:
        labels = ensemble.labels[rows]
        columns["label"] = np.where(labels >= 0, names[labels], "")
    columns["predicted"] = names[decisions.predicted[rows]]
    for name in ("confidence", "alpha_0", "total_variance", "mutual_information"):
        columns[name] = getattr(decisions, name)[rows]
    if decisions.order not in columns:
        columns[decisions.order] = decisions.uncertainty[rows]
    columns["flags"] = decisions.flag_names(rows)
    if decisions.kept is not None:
        columns["decision"] = np.where(decisions.kept[rows], "kept", "abstained")
    columns |= {f"p_{name}": decisions.mean[rows, k] for k, name in enumerate(ensemble.class_names)}
    return pd.DataFrame(columns)


def write_table(folder, ensemble, decisions):
    """Write the table of all inputs to inputs.csv and inputs.parquet, in blocks of rows."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    writers = []
    try:
        for start in range(0, ensemble.shape[1], ROWS_WRITTEN_AT_ONCE):
            block = table(ensemble, decisions, slice(start, start + ROWS_WRITTEN_AT_ONCE))
            block = pa.Table.from_pandas(block, preserve_index=False)
            if not writers:
                texts = [
                    name for name, kind in zip(block.column_names, block.schema.types, strict=True) if kind != "double"
                ]
                writers = [
                    csv.CSVWriter(
                        Path(folder) / OUTPUTS[0], block.schema, write_options=csv.WriteOptions(quoting_style="needed")
                    ),
                    parquet.ParquetWriter(Path(folder) / OUTPUTS[1], block.schema, use_dictionary=texts),
                ]
            for writer in writers:
                writer.write_table(block)
    finally:
        for writer in writers:
            writer.close()


def check_output(path):
    """Raise an EnsembleError unless path is new, or a folder with nothing but an earlier output."""
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise EnsembleError(f"{path} is a file; name a folder")
    if path.is_dir():
        foreign = sorted(entry.name for entry in path.iterdir() if entry.name not in OUTPUTS)
        if foreign:
            raise EnsembleError(f"{path} is there and holds other files ({foreign[0]}); name another folder")


@contextmanager
def output_folder(path):
    """A temporary folder beside path that becomes path, in place of an earlier output, when the block ends well.

    Otherwise it vanishes, and an earlier output stays.
    """
    path = Path(path)
    check_output(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as temporary:
            made = Path(temporary) / "new"
            made.mkdir()
            yield made
            if path.exists():
                os.replace(path, Path(temporary) / "old")
            shutil.move(made, path)
    except OSError as error:
        raise EnsembleError(f"{path} could not be written: {error.strerror or error}") from error
