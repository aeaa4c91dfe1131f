"""Read tables: all rows, or only those of one user."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.arguments import shown
from coterie.data.columns import check_names
from coterie.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

CHUNK_ROWS = 100_000
"""The number of rows of a file in memory at a time, where only one user's are kept."""


def read_table(data: pd.DataFrame | Path | str) -> pd.DataFrame:
    """Return a DataFrame as it is, or read a CSV or Parquet file.

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
    frame = next(_pieces(Path(data), None))
    if frame.empty:
        raise DataError(f"{data} has no rows")
    return frame


def users_in(path: Path | str, user_column: str) -> list[str]:
    """Return the users of a table, in its order."""
    names = (name for piece in _pieces(Path(path)) for name in _whose(piece, user_column))
    return list(dict.fromkeys(names))


def read_rows(path: Path | str, user_column: str | None, user: str) -> pd.DataFrame:
    """Read only one user's rows of a table; all rows where `user_column` is None."""
    import pandas as pd

    if user_column is None:
        return read_table(path)
    rows = pd.concat([piece[_whose(piece, user_column) == user] for piece in _pieces(Path(path))])
    if rows.empty:
        raise DataError(f"{path} has no row of {user!r} in column {user_column!r}")
    return rows


def some(names: Iterable[object], most: int = 12) -> str:
    """Return names between commas, the first of them where they are many."""
    shown = [repr(str(name)) for name in names]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")


def _whose(piece: pd.DataFrame, user_column: str) -> pd.Series[str]:
    if user_column not in piece.columns:
        raise DataError(f"the table has no column {user_column!r}; it has {some(piece.columns)}")
    return piece[user_column].astype(str)


def _pieces(path: Path, rows: int | None = CHUNK_ROWS) -> Iterator[pd.DataFrame]:
    """Read a file some rows at a time; Parquet, and every file where `rows` is None, at once."""
    import pandas as pd

    if not path.exists():
        raise DataError(f"there is no file {path}")
    try:
        if path.suffix in (".parquet", ".pq"):
            yield pd.read_parquet(path)
            return
        # pandas would rename the second column of a name without a word
        check_names(pd.read_csv(path, header=None, nrows=1, dtype=str).iloc[0].dropna(), str(path))
        if rows is None:
            yield pd.read_csv(path)
        else:
            yield from pd.read_csv(path, chunksize=rows)
    except (ValueError, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as a table: {error}; give a CSV or a .parquet file") from error
