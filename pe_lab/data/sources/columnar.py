"""Files of columns: Parquet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pe_lab.data.sources.files import Files, InputFile, Part, read_failed
from pe_lab.data.sources.records import Records
from pe_lab.data.sources.source import Document
from pe_lab.errors import ConfigError

BATCH_ROWS = 2048


class ParquetFiles(Files):
    """Parquet files, one document per row, streamed a few thousand rows at a time."""

    def __init__(self, name: str, files: Sequence[InputFile], records: Records):
        super().__init__(name, files, records)
        self._open(files[0].name).close()  # finds a wrong column early

    def splits(self, file: InputFile | Part) -> bool:
        return True

    def _open(self, name: str) -> Any:
        import pyarrow
        import pyarrow.parquet

        try:
            file = pyarrow.parquet.ParquetFile(name)
        except (OSError, pyarrow.ArrowException) as error:
            raise read_failed(name, error) from error
        check_schema(name, file.schema_arrow, self._records)
        return file

    def read_part(self, part: Part) -> Iterator[Document]:
        import pyarrow

        with self._open(part.name) as file:
            groups = file.metadata.num_row_groups
            # A row group is in the part where it would begin if all had one size: the parts need no metadata.
            chosen = [i for i in range(groups) if part.start <= i * part.size // groups < part.stop]
            if not chosen:
                return
            row = sum(file.metadata.row_group(i).num_rows for i in range(chosen[0]))
            columns = self._records.columns_of(file.schema_arrow.names)
            try:
                for batch in file.iter_batches(batch_size=BATCH_ROWS, row_groups=chosen, columns=columns):
                    yield from documents(batch, self._records, part.name, row)
                    row += batch.num_rows
            except (OSError, pyarrow.ArrowException) as error:
                raise read_failed(part.name, error) from error

    def count(self) -> int | None:
        total = 0
        for file in self._files:
            with self._open(file.name) as opened:
                total += opened.metadata.num_rows
        return total


def check_schema(name: str, schema: Any, records: Records) -> None:
    """`ConfigError` if a column is missing, or the only one is not of strings."""
    import pyarrow

    records.check_columns(name, schema.names)
    if not records.is_column or (column := records.columns[0]) not in schema.names:
        return
    kind = schema.field(column).type
    inner = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    if inner not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
        raise ConfigError(f"{name}: column {column!r} is of type {kind}, not text. Set the source's column.")


def documents(batch: Any, records: Records, name: str, row: int) -> Iterator[Document]:
    """The documents of a record batch whose first row is the file's `row`, from 0."""
    if records.is_column and batch.schema.names == list(records.columns):
        yield from map(Document, filter(None, batch.column(0).to_pylist()))
        return
    for number, record in enumerate(batch.to_pylist(), row + 1):
        if (document := records.document(record, lambda number=number: f"{name}, row {number}")) is not None:
            yield document
