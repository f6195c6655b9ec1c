"""Files of columns: Parquet and Arrow."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from pe_lab.data.sources.files import Files, Part, reading
from pe_lab.data.sources.records import Records
from pe_lab.data.sources.source import Document
from pe_lab.errors import ConfigError, DataError
from pe_lab.storage import InputFile, open_file

BATCH_ROWS = 2048  # that are read at once, at most
BATCH_BYTES = 2**25  # of these rows, about
MOST_COUNTED = 64  # remote files, each of which costs a request
ARROW_FILE = b"ARROW1\0\0"  # the beginning of an Arrow file; a stream begins with its first message


class _Columns(Files):
    """Files with a schema, one document per row."""

    def __init__(self, name: str, files: Sequence[InputFile], records: Records):
        super().__init__(name, files, records)
        with self._open(files[0].name, files[0].size):
            pass  # finds a wrong column early

    def splits(self, name: str) -> bool:
        return True

    def _open(self, name: str, size: int) -> Any:
        raise NotImplementedError


class ParquetFiles(_Columns):
    """Parquet files, of which the columns that are used are streamed, a few thousand rows at a time."""

    def _open(self, name: str, size: int) -> Any:
        import pyarrow.parquet

        if size < 0:
            raise DataError(
                f"{name}: a Parquet file is read in parts, and the server serves none, or tells no size. Download it."
            )
        with reading(name):
            file = pyarrow.parquet.ParquetFile(open_file(name, size, buffered=False))
        check_schema(name, file.schema_arrow, self._records)
        return file

    def read_part(self, part: Part) -> Iterator[Document]:
        with self._open(part.name, part.size) as file, reading(part.name):
            groups = file.metadata.num_row_groups
            # A row group is in the part where it would begin if all had one size: the parts need no metadata.
            chosen = [i for i in range(groups) if part.start <= i * part.size // groups < part.stop]
            if not chosen:
                return
            row = sum(file.metadata.row_group(i).num_rows for i in range(chosen[0]))
            columns = self._records.columns_of(file.schema_arrow.names)
            size = max(file.metadata.row_group(i).total_byte_size for i in chosen)
            rows = _rows_of(size, max(file.metadata.row_group(i).num_rows for i in chosen))
            for batch in file.iter_batches(batch_size=rows, row_groups=chosen, columns=columns):
                yield from documents(batch, self._records, part.name, row)
                row += batch.num_rows

    def count(self) -> int | None:
        if len(self._files) > MOST_COUNTED and any("://" in file.name for file in self._files):
            return None
        total = 0
        for file in self._files:
            with self._open(file.name, file.size) as opened:
                total += opened.metadata.num_rows
        return total


class ArrowFiles(_Columns):
    """Arrow files and streams (the `data-*.arrow` of Hugging Face's datasets), a record batch at a time."""

    def splits(self, name: str) -> bool:
        return "://" not in name

    @contextlib.contextmanager
    def _open(self, name: str, size: int) -> Iterator[tuple[Any, Any]]:
        """The bytes of a file, and what reads record batches from them: of a file by index, of a stream in order."""
        import pyarrow

        with reading(name), contextlib.ExitStack() as stack:
            if "://" not in name:
                file = stack.enter_context(pyarrow.memory_map(name))
            else:
                file = pyarrow.PythonFile(stack.enter_context(open_file(name, size)), "r")
            begins = b"" if size < 0 else file.read(len(ARROW_FILE))
            if begins:
                file.seek(0)
            of = pyarrow.ipc.open_file if begins == ARROW_FILE else pyarrow.ipc.open_stream
            batches = stack.enter_context(of(file))
            check_schema(name, batches.schema, self._records)
            yield file, batches

    def read_part(self, part: Part) -> Iterator[Document]:
        if not part.size:
            return
        with self._open(part.name, part.size) as (file, batches):
            columns = [name for name in batches.schema.names if name in self._records.tops(batches.schema.names)]
            for index, batch in self._batches(part, file, batches):
                chosen, name = batch.select(columns), f"{part.name}, record batch {index}"
                step = _rows_of(chosen.nbytes, chosen.num_rows)
                for row in range(0, chosen.num_rows, step):
                    yield from documents(chosen.slice(row, step), self._records, name, row)

    def _batches(self, part: Part, file: Any, batches: Any) -> Iterator[tuple[int, Any]]:
        """The record batches that begin in a part, with their numbers."""
        if hasattr(batches, "get_batch"):
            number = batches.num_record_batches
            for index in range(number):
                if part.start <= index * part.size // number < part.stop:
                    yield index, _checked(batches.get_batch(index))
            return
        for index in itertools.count():
            # A batch of a stream says where the next begins. A memory map passes over those before the part.
            begins = file.tell() if self.splits(part.name) else part.start
            if begins >= part.stop and part.size >= 0:
                return
            try:
                batch = batches.read_next_batch()
            except StopIteration:
                return
            if begins >= part.start:
                yield index, _checked(batch)


def _rows_of(size: int, rows: int) -> int:
    """How many rows to read at once, of so many that take `size` bytes."""
    return min(max(BATCH_BYTES * rows // max(size, 1), 1), BATCH_ROWS)


def _checked(batch: Any) -> Any:
    """The batch, if its offsets lie within its bytes: of a damaged file they need not."""
    batch.validate(full=True)
    return batch


def check_schema(name: str, schema: Any, records: Records) -> None:
    """`ConfigError` if a column is missing, is there twice, or the only one is not of strings."""
    import pyarrow

    records.check_columns(name, schema.names)
    for top in sorted(records.tops(schema.names)):
        if twice := _twice(top, [field for field in schema if field.name == top]):
            raise ConfigError(
                f"{name} has two columns {twice!r}. Write the file again with another name for one of them."
            )
    for column in records.columns:
        if column not in schema.names:
            kind = schema
            for part in column.split("."):
                if kind.get_field_index(part) < 0:
                    raise records.no_column(name, column, [field.name for field in kind])
                kind = kind.field(part).type
                if not pyarrow.types.is_struct(kind):
                    break
    if not records.is_column or (column := records.columns[0]) not in schema.names:
        return
    kind = schema.field(column).type
    inner = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    if inner not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
        raise ConfigError(f"{name}: column {column!r} is of type {kind}, not text. Set the source's column.")


def _twice(name: str, fields: Sequence[Any]) -> str:
    """The name of a column that is there twice, among fields of one name or within one; "" if none is."""
    if len(fields) > 1:
        return name
    kind = fields[0].type if fields else None
    inner = [kind.field(i) for i in range(getattr(kind, "num_fields", 0))]  # of structs, lists and maps
    of_name = {field.name: [other for other in inner if other.name == field.name] for field in inner}
    return next(filter(None, (_twice(f"{name}.{each}", found) for each, found in of_name.items())), "")


def documents(batch: Any, records: Records, name: str, row: int) -> Iterator[Document]:
    """The documents of a record batch whose first row is the file's `row`, from 0."""
    if records.is_column and batch.schema.names == list(records.columns):
        yield from map(Document, filter(None, batch.column(0).to_pylist()))
        return
    for number, record in enumerate(batch.to_pylist(), row + 1):
        if (document := records.document(record, lambda number=number: f"{name}, row {number}")) is not None:
            yield document
