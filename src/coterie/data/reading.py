"""Read tables: all rows, or only those of one user."""

from __future__ import annotations

import glob
import io
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import pandas as pd

from coterie.arguments import Check, check_settings, instance, listed, shown
from coterie.data.columns import check_names
from coterie.errors import DataError, did_you_mean, few_of

CHUNK_ROWS = 100_000
"""The number of rows of a file in memory at a time, where only one user's are kept."""
USER = "{user}"
"""What stands for a user's name in the name of its file."""

_SIGN = Check("be a text", instance(str, "a text").read, DataError)


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(each.strip() for each in value.split(",")) if value else ()
    return tuple(map(str, listed(instance((str, int, float), ""), "").read(value)))


TEXTS = Check("be texts, in a list or between commas", _texts, DataError)
"""Texts as they are listed in Python, or as the command line gives them."""


@dataclass(frozen=True, kw_only=True)
class FileForm:
    """How a CSV file is written.

    Args:
        sep: Column separator of a CSV file (`tab` for a tab).
        decimal: Decimal mark of a CSV file.
        na_values: What else stands for an unknown value in a CSV file, between commas: `?,-9`.
        header: Names of the columns, between commas, for a CSV file whose first line is data.
    """

    sep: Annotated[str, _SIGN] = ","
    decimal: Annotated[str, _SIGN] = "."
    na_values: Annotated[str | Sequence[str], TEXTS] = ()
    header: Annotated[str | Sequence[str], TEXTS] = ()

    def __post_init__(self) -> None:
        check_settings(self)
        for option in ("sep", "decimal"):
            value = "\t" if getattr(self, option) == "tab" else getattr(self, option)
            if len(value) != 1 or value.isalnum():
                raise DataError(f"`{option}` must be one sign, such as ',' or ';', got {value!r}")
        if self.sep == self.decimal:
            raise DataError(f"`sep` and `decimal` must differ, got {self.sep!r} for both")
        check_names(self.header, "`header`")

    @property
    def form(self) -> dict[str, Any]:
        """How the file is written, as `read_table` takes it."""
        return {each.name: getattr(self, each.name) for each in fields(FileForm)}


def read_table(
    data: pd.DataFrame | Path | str,
    *,
    user_column: str | None = None,
    as_written: Collection[str] = (),
    sep: str = ",",
    decimal: str = ".",
    na_values: str | Sequence[str] = (),
    header: str | Sequence[str] = (),
) -> pd.DataFrame:
    """Return a DataFrame as it is, or read a CSV or Parquet file, which may be a pipe.

    With `{user}` in the name of the file every user has a file of its own, and the column
    `user_column` says whose row it is.

    Args:
        data: a DataFrame, or the name of a file.
        user_column: the column with the name of each row's user, which is read as it is written.
        as_written: other columns of names: 007 is not 7.
        sep: what is between the columns of a CSV file, "tab" for a tab.
        decimal: its decimal mark.
        na_values: what stands for an unknown value in it, beside an empty field, `NA` and so on.
        header: the names of its columns, where its first line is data.

    Example:
        >>> import pandas as pd
        >>> read_table(pd.DataFrame({"a": [1]})).shape
        (1, 1)
    """
    form = FileForm(sep=sep, decimal=decimal, na_values=na_values, header=header)
    if isinstance(data, pd.DataFrame):
        check_names(data.columns)
        _check_form_used(form, "a DataFrame, where NaN is an unknown value")
        return data
    if not isinstance(data, str | Path):
        raise DataError(f"a table must be a DataFrame or the path of a file, got {shown(data)}")
    frame = pd.concat(_pieces(Path(data), form, user_column, as_written, rows=None))
    if frame.empty:
        raise DataError(f"{data} has no rows")
    return frame


def rank_file(data: Path | str, rank: int) -> str:
    """Return the name of a process's own file, where `{rank}` stands in the name."""
    return str(data).replace("{rank}", str(rank))


def users_in(path: Path | str, user_column: str, form: FileForm) -> list[str]:
    """Return the users of a table, in its order."""
    pieces = _pieces(Path(path), form, user_column)
    return list(dict.fromkeys(name for piece in pieces for name in _whose(piece, user_column)))


def read_rows(path: Path | str, user_column: str | None, user: str, form: FileForm) -> pd.DataFrame:
    """Read only one user's rows of a table.

    All where `user_column` is None.
    """
    if user_column is None:
        return read_table(path, **form.form)
    pieces = _pieces(Path(path), form, user_column)
    rows = pd.concat([piece[_whose(piece, user_column) == user] for piece in pieces])
    if rows.empty:
        raise DataError(f"{path} has no row of {user!r} in column {user_column!r}")
    return rows


def no_column(column: str, columns: Collection[Any], why: str = "") -> DataError:
    """Return the error that a table has no such column, with the one that may be meant."""
    there = list(map(str, columns))
    hint = did_you_mean(column, there)
    return DataError(f"the table has no column {column!r}{why}; it has {few_of(there)}{hint}")


def _whose(piece: pd.DataFrame, user_column: str) -> pd.Series[str]:
    if user_column not in piece.columns:
        raise no_column(user_column, piece.columns)
    return piece[user_column].astype(str)


def _check_form_used(form: FileForm, what: str) -> None:
    for option in ("na_values", "header"):
        if getattr(form, option):
            raise DataError(f"`{option}` is for CSV files, and this is {what}; leave it out")


def _pieces(
    path: Path,
    form: FileForm,
    user_column: str | None,
    as_written: Collection[str] = (),
    rows: int | None = CHUNK_ROWS,
) -> Iterator[pd.DataFrame]:
    """Read a table some rows at a time; all of each file where `rows` is None."""
    kinds = dict.fromkeys([*as_written, *([user_column] if user_column else [])], str)
    if USER not in str(path):
        yield from _pieces_of_file(path, form, kinds, rows)
        return
    if user_column is None:
        raise DataError(f"{path} has a file for each user; `user_column` must name their column")
    before, _, after = str(path).partition(USER)
    found = sorted(glob.glob(f"{glob.escape(before)}*{glob.escape(after)}"))
    if not found:
        raise DataError(f"there is no file {path}, whatever stands for {USER}")
    start = 0  # rows are counted through all files
    for name in found:
        for piece in _pieces_of_file(Path(name), form, kinds, rows):
            if user_column in piece.columns:
                what = f"{name} has a column {user_column!r}, and {USER} says whose its rows are"
                raise DataError(f"{what} too; name another `user_column`")
            piece.index = piece.index + start
            yield piece.assign(**{user_column: name[len(before) : len(name) - len(after)]})
        start = int(piece.index[-1]) + 1 if len(piece) else start


def _pieces_of_file(
    path: Path, form: FileForm, kinds: Mapping[str, type], rows: int | None
) -> Iterator[pd.DataFrame]:

    sep = "\t" if form.sep == "tab" else form.sep
    if not path.exists():
        raise DataError(f"there is no file {path}")
    try:
        if path.suffix in (".parquet", ".pq"):
            _check_form_used(form, f"a Parquet file, {path}")
            yield pd.read_parquet(path)
            return
        # what a pipe holds can be read once
        source = path if path.is_file() else io.BytesIO(path.read_bytes())
        options: dict[str, Any] = {"sep": sep, "decimal": form.decimal, "dtype": kinds}
        options |= {"na_values": list(form.na_values)} if form.na_values else {}
        head = pd.read_csv(source, header=None, nrows=1, dtype=str, sep=sep).iloc[0]
        if form.header:
            if len(head) != len(form.header):
                count = f"`header` names {len(form.header)} columns, but {path} has {len(head)}"
                raise DataError(f"{count} in its first line, which is {few_of(head)}")  # noqa: TRY301  # see below
            options |= {"header": None, "names": list(form.header)}
        else:
            # pandas would rename the second column of a name without a word
            check_names(head.dropna(), str(path))
            _check_separated(head.dropna().tolist(), sep, path)
        if isinstance(source, io.BytesIO):
            source.seek(0)
        if rows is None:
            yield pd.read_csv(source, **options)
        else:
            yield from pd.read_csv(source, chunksize=rows, **options)
    except DataError:
        raise
    except UnicodeDecodeError as error:
        text = f"{path} is not in UTF-8: byte {error.object[error.start]:#x} is no part of it"
        raise DataError(
            f"{text}; save it again as UTF-8 (of a spreadsheet: as 'CSV UTF-8')"
        ) from error
    except (ValueError, OSError) as error:
        reason = str(error).strip()
        raise DataError(
            f"{path} cannot be read as a table: {reason}; give a CSV or a .parquet file"
        ) from error


def _check_separated(names: list[str], sep: str, path: Path) -> None:
    """Refuse a file whose only column is several between which another sign stands."""
    other = [sign for sign in ";\t,|" if sign != sep and sign in names[0]]
    if len(names) == 1 and other:
        remedy = "tab" if other[0] == "\t" else other[0]
        raise DataError(
            f"{path} has one column, {names[0]!r}; if {other[0]!r} is between columns, "
            f"say `sep={remedy!r}` (`--sep {quote(remedy)}`)"
        )
