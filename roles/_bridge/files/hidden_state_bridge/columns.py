# SPDX-License-Identifier: Apache-2.0
"""Parquet and Arrow sources: batches of rows, and the records in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .records import BadRecord, Encode, Parsed, add_row, check_ids, check_mask_length, key_of, no_mask
from .sources import BadFile, Settings, SourceFile
from .streams import missing_package

# Rows read at once: some MiB of tokens.
BATCH_ROWS = 256


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise missing_package("pyarrow", "a Parquet or Arrow source") from None
    return pyarrow


def _wanted(names: list[str], settings: Settings) -> list[str]:
    """The columns that are read: those of tokens where there are any, else all (a chat template may use any of them)."""
    if settings.input_ids_field not in names:
        return names
    return [name for name in names if name in (settings.input_ids_field, settings.loss_mask_field, settings.id_field)]


def row_batches(file: SourceFile) -> Iterator[tuple[int, bytes]]:
    """The rows of a file as (number of the first row from 1, one record batch in Arrow's stream format).

    Raises BadFile for a file that is not of its kind or damaged, and OSError.
    """
    arrow = _pyarrow()
    settings = file.source.settings
    row = 1
    try:
        with arrow.OSFile(file.path) as source:
            for batch in (_parquet if file.kind == "parquet" else _arrow)(arrow, source, settings):
                if batch.num_rows:
                    yield row, _packed(arrow, batch)
                row += batch.num_rows
    except (arrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        damaged = BadFile(f"not a whole {file.kind.capitalize()} file ({' '.join(str(error).split())[:200]}); fetch or write it again")
        damaged.line = row if row > 1 else 0
        raise damaged from None


def _parquet(arrow: Any, source: Any, settings: Settings) -> Iterator[Any]:
    with arrow.parquet.ParquetFile(source) as reader:
        yield from reader.iter_batches(BATCH_ROWS, columns=_wanted(reader.schema_arrow.names, settings))


def _arrow(arrow: Any, source: Any, settings: Settings) -> Iterator[Any]:
    """Arrow's file format, by its first bytes, or the stream format, as Hugging Face datasets writes it."""
    magic = source.read(6)
    source.seek(0)
    if magic == b"ARROW1":
        reader = arrow.ipc.open_file(source)
        batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
    else:
        batches = reader = arrow.ipc.open_stream(source)
    wanted = _wanted(reader.schema.names, settings)
    for batch in batches:
        batch = batch.select(wanted)
        for start in range(0, batch.num_rows, BATCH_ROWS):
            yield batch.slice(start, BATCH_ROWS)


def _packed(arrow: Any, batch: Any) -> bytes:
    sink = arrow.BufferOutputStream()
    with arrow.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def parse_batch(data: bytes, first_row: int, settings: Settings, encode: Encode) -> Parsed:
    """The records in one batch of `row_batches`."""
    arrow = _pyarrow()
    batch = arrow.ipc.open_stream(data).read_next_batch()
    parsed = Parsed()
    if settings.input_ids_field not in batch.schema.names:
        for line, row in enumerate(batch.to_pylist(), first_row):
            try:
                add_row(parsed, line, {key: value for key, value in row.items() if value is not None}, settings, encode)
            except BadRecord as error:
                parsed.rejects.append((line, str(error), ""))
        return parsed
    names = batch.schema.names
    ids = _Lists(arrow, batch, settings.input_ids_field)
    masks = _Lists(arrow, batch, settings.loss_mask_field, booleans=True) if settings.loss_mask_field in names else None
    keys = batch.column(settings.id_field).to_pylist() if settings.id_field in names else None
    for index in range(batch.num_rows):
        try:
            key = key_of(keys[index] if keys else None, settings)
            input_ids = ids.row(index)
            if input_ids is None:
                raise BadRecord(f"{settings.input_ids_field} is null, not a list; give the token ids as a list of integers")
            check_ids(input_ids, settings)
            mask = masks.row(index) if masks else None
            parsed.add(first_row + index, input_ids, _mask(mask, len(input_ids), settings), key, settings)
        except BadRecord as error:
            parsed.rejects.append((first_row + index, str(error), ""))
    return parsed


def _mask(mask: np.ndarray | None, tokens: int, settings: Settings) -> np.ndarray:
    if mask is None:
        return no_mask(tokens, settings)
    check_mask_length(len(mask), tokens, settings)
    if mask.min() < 0 or mask.max() > 1:
        position = int(np.flatnonzero((mask < 0) | (mask > 1))[0])
        raise BadRecord(f"{settings.loss_mask_field}[{position}] is {mask[position]}; only 0 and 1 are allowed")
    return mask.astype(np.uint8)


class _Lists:
    """A column of lists of integers, row by row without copies."""

    def __init__(self, arrow: Any, batch: Any, name: str, booleans: bool = False) -> None:
        column = batch.column(name)
        self._name, self._column, self._wrong = name, column, ""
        types, kind = arrow.types, column.type
        if not (types.is_list(kind) or types.is_large_list(kind)):
            self._wrong = f"{name} is a column of {kind}, not of lists; give lists of integers"
        elif not (types.is_integer(kind.value_type) or (booleans and types.is_boolean(kind.value_type))):
            self._wrong = f"{name} is a column of lists of {kind.value_type}, not of integers; give lists of integers"
        else:
            values = column.values
            self._nulls = values.is_null().to_numpy(zero_copy_only=False) if values.null_count else None
            self._values = (values.fill_null(0) if values.null_count else values).to_numpy(zero_copy_only=False)
            self._offsets = column.offsets.to_numpy()

    def row(self, index: int) -> np.ndarray | None:
        """The integers of that row, or None for null. Raises BadRecord."""
        if not self._column[index].is_valid:
            return None
        if self._wrong:
            raise BadRecord(self._wrong)
        first, last = self._offsets[index], self._offsets[index + 1]
        if self._nulls is not None and self._nulls[first:last].any():
            position = int(np.flatnonzero(self._nulls[first:last])[0])
            raise BadRecord(f"{self._name}[{position}] is null, not an integer; mend the row or take it out")
        return self._values[first:last]
