"""Read Parquet in batches of rows and convert its values to JSON."""

from __future__ import annotations

import base64
import datetime
import decimal
import math
import numbers
import uuid
from collections.abc import Iterator
from typing import Any

from osmosis_ai.data.formats.source import CHUNK, BadRowError, Item, Source, UnreadableError, check_columns, quoted
from osmosis_ai.records import JsonObject, JsonValue

__all__ = ["read"]

INSTALL = "pip install 'osmosis-ai[parquet]'"
_BATCH_ROWS = 256
_BATCH_BYTES = 4 * 1024 * 1024
"""Bounds of a batch, whichever is smaller. PyArrow's own batches of 65,536 rows could hold gigabytes of prompts."""


def read(source: Source) -> Iterator[Item]:
    """Yield the rows of all row groups."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UnreadableError("", f"reading Parquet needs pyarrow: {INSTALL}") from None
    index = 0
    try:
        # A buffer size makes pyarrow read columns page by page instead of a whole row group.
        with pyarrow.parquet.ParquetFile(source.path, buffer_size=CHUNK, pre_buffer=False) as parquet:
            names = list(parquet.schema_arrow.names)
            check_columns(names, "")
            metadata = parquet.metadata
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            row_bytes = max(1, sum(group.total_byte_size for group in groups) // max(1, metadata.num_rows))
            batch_rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES // row_bytes))
            size = source.path.stat().st_size
            for batch in parquet.iter_batches(batch_size=batch_rows, use_threads=False):
                columns = [_python_values(column) for column in batch.columns]
                for values in zip(*columns, strict=True):
                    read = size * (index + 1) // max(1, metadata.num_rows)
                    yield Item(f"row {index} (the first is 0)", _plain_row(names, values), min(size, read))
                    index += 1
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        # Sizes in a damaged file can be anything, so PyArrow may fail while it allocates, seeks or decodes.
        where = f"after row {index - 1} (the first is 0)" if index else ""
        reason = " ".join(str(error).split())[:300]
        raise UnreadableError(where, f"not a readable parquet file: {reason}") from None


def _python_values(column: Any) -> list[Any]:
    import pyarrow

    kind = column.type
    if pyarrow.types.is_timestamp(kind) and kind.unit == "ns":
        # Python's datetime has microseconds at best; nanoseconds would need pandas.
        column = column.cast(pyarrow.timestamp("us", kind.tz), safe=False)
    try:
        values: list[Any] = column.to_pylist()
    except (pyarrow.ArrowException, ValueError, OverflowError, LookupError, TypeError):
        # Some value has no Python form. As scalars, the column's other values remain usable.
        return list(column)
    return values


def _plain_row(names: list[str], values: tuple[object, ...]) -> JsonObject | str:
    row: JsonObject = {}
    for name, value in zip(names, values, strict=True):
        # Bytes in a text column make the row unusable; base64 would silently change the text.
        if isinstance(value, bytes) and name.casefold() in ("system_prompt", "user_prompt", "ground_truth"):
            row[name] = value
            continue
        try:
            row[name] = _plain(value)
        except BadRowError as error:
            return f"column {quoted(name)}: {error}"
    return row


def _plain(value: object) -> JsonValue:
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        # `str` may use an exponent: 1E+2.
        return format(value, "f")
    if isinstance(value, (datetime.timedelta, uuid.UUID)):
        return str(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        if math.isinf(number):
            raise BadRowError("an infinite number, which has no JSON form")
        return None if math.isnan(number) else number
    return _plain(_scalar_value(value))


def _scalar_value(value: object) -> object:
    import pyarrow

    if not isinstance(value, pyarrow.Scalar):
        raise BadRowError(f"a value of type {type(value).__name__}, which has no JSON form")
    try:
        found = value.as_py()
    except (pyarrow.ArrowException, ValueError, OverflowError, LookupError, TypeError) as error:
        raise BadRowError(f"a value of type {value.type} that can't be read: {error}") from None
    if isinstance(found, pyarrow.Scalar):
        raise BadRowError(f"a value of type {value.type}, which has no JSON form")
    return found
