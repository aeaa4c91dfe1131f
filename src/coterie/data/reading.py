"""Read tables: all rows, or only those of one user."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from coterie.arguments import shown
from coterie.data.columns import check_names
from coterie.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

CHUNK_ROWS = 100_000
"""The number of rows of a file in memory at a time, where only one user's are kept."""


def read_table(
    data: pd.DataFrame | Path | str,
    *,
    sep: str = ",",
    decimal: str = ".",
    as_written: Collection[str] = (),
) -> pd.DataFrame:
    """Return a DataFrame as it is, or read a CSV or Parquet file, which may be a pipe.

    In a CSV file `sep` is between columns ("tab" for a tab) and `decimal` is before decimals.
    Columns of names are read `as_written`: 007 is not 7.

    Example:
        >>> import pandas as pd
        >>> read_table(pd.DataFrame({"a": [1]})).shape
        (1, 1)
    """
    import pandas as pd

    if isinstance(data, pd.DataFrame):
        check_names(data.columns)
        return data
    if not isinstance(data, str | Path):
        raise DataError(f"a table must be a DataFrame or the path of a file, got {shown(data)}")
    frame = next(_pieces(Path(data), None, sep=sep, decimal=decimal, as_written=as_written))
    if frame.empty:
        raise DataError(f"{data} has no rows")
    return frame


def users_in(
    path: Path | str, user_column: str, *, sep: str = ",", decimal: str = "."
) -> list[str]:
    """Return the users of a table, in its order; `sep` and `decimal` are as in `read_table`."""
    pieces = _pieces(Path(path), sep=sep, decimal=decimal, as_written=[user_column])
    return list(dict.fromkeys(name for piece in pieces for name in _whose(piece, user_column)))


def read_rows(
    path: Path | str, user_column: str | None, user: str, *, sep: str = ",", decimal: str = "."
) -> pd.DataFrame:
    """Read only one user's rows of a table.

    All where `user_column` is None. The rest is as in `read_table`.
    """
    import pandas as pd

    if user_column is None:
        return read_table(path, sep=sep, decimal=decimal)
    pieces = _pieces(Path(path), sep=sep, decimal=decimal, as_written=[user_column])
    rows = pd.concat([piece[_whose(piece, user_column) == user] for piece in pieces])
    if rows.empty:
        raise DataError(f"{path} has no row of {user!r} in column {user_column!r}")
    return rows


def few_of(names: Iterable[object], most: int = 12) -> str:
    """Return names between commas, the first of them where they are many."""
    shown = [repr(str(name)) for name in names]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")


def _whose(piece: pd.DataFrame, user_column: str) -> pd.Series[str]:
    if user_column not in piece.columns:
        raise DataError(f"the table has no column {user_column!r}; it has {few_of(piece.columns)}")
    return piece[user_column].astype(str)


def _pieces(
    path: Path,
    rows: int | None = CHUNK_ROWS,
    *,
    sep: str = ",",
    decimal: str = ".",
    as_written: Collection[str] = (),
) -> Iterator[pd.DataFrame]:
    """Read a file some rows at a time; Parquet, and every file where `rows` is None, at once."""
    import pandas as pd

    kinds = dict.fromkeys(as_written, str)
    sep = "\t" if sep == "tab" else sep
    for option, value in (("sep", sep), ("decimal", decimal)):
        if len(value) != 1 or value.isalnum():
            raise DataError(f"`{option}` must be one sign, such as ',' or ';', got {value!r}")
    if sep == decimal:
        raise DataError(f"`sep` and `decimal` must differ, got {sep!r} for both")
    if not path.exists():
        raise DataError(f"there is no file {path}")
    try:
        if path.suffix in (".parquet", ".pq"):
            yield pd.read_parquet(path)
            return
        # what a pipe holds can be read once
        source = path if path.is_file() else io.BytesIO(path.read_bytes())
        # pandas would rename the second column of a name without a word
        head = pd.read_csv(source, header=None, nrows=1, dtype=str, sep=sep).iloc[0].dropna()
        check_names(head, str(path))
        _check_separated(head.tolist(), sep, path)
        if isinstance(source, io.BytesIO):
            source.seek(0)
        if rows is None:
            yield pd.read_csv(source, sep=sep, decimal=decimal, dtype=kinds)
        else:
            yield from pd.read_csv(source, chunksize=rows, sep=sep, decimal=decimal, dtype=kinds)
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
