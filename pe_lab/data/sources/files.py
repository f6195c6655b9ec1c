"""Files of texts, of JSON lines and of columns (Parquet and Arrow), on disks, object stores and web servers."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import hashlib
import io
import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pe_lab.data.sources.records import Records
from pe_lab.data.sources.source import SHARD_BYTES, DataSource, Document, InputShard, grouped, split_evenly
from pe_lab.errors import ConfigError, DataError, UserError, redacted, resource
from pe_lab.storage import InputFile, json_object, open_file

COMPRESSED = (".gz", ".zst")
LINE_BYTES = 2**20  # in which a line ends, or the document ends within it
MOST_LINE_BYTES = 2**27  # of a record of JSON lines
BATCH_ROWS = 2048  # that are read at once, at most
BATCH_BYTES = 2**25  # of these rows, about
MOST_COUNTED = 64  # remote files, each of which costs a request
ARROW_FILE = b"ARROW1\0\0"  # the beginning of an Arrow file; a stream begins with its first message
MOST_EXPANSION = 100  # of a compressed text, which shrinks to a third or a tenth; deflate can expand by 1,032


class Part(NamedTuple):
    """The bytes [start, stop) of a file of `size` bytes, or the whole of one of unknown size, -1."""

    name: str
    size: int
    start: int
    stop: int

    def __str__(self) -> str:
        base = redacted(self.name).rpartition("/")[2]  # a signature may have a slash
        whole = self.stop - self.start == self.size
        return base if whole else f"{base} bytes {self.start:,} to {self.stop:,}"


class Files(DataSource):
    """The files of a source. A shard is a list of parts of files."""

    part_bytes = SHARD_BYTES  # at most
    rows: int | None = None  # of all files, where a catalogue tells them
    about: Mapping[str, Any] = {}  # what else the identity has

    def __init__(self, name: str, files: Sequence[InputFile], records: Records):
        self.name, self._files, self._records = name, files, records

    def splits(self, name: str) -> bool:
        """Whether a part of a file can be read by itself."""
        return not name.endswith(COMPRESSED)

    def shards(self) -> list[InputShard]:
        parts = [
            Part(file.name, file.size, start, stop)
            for file in self._files
            for start, stop in (
                split_evenly(file.size, self.part_bytes) if self.splits(file.name) else [(0, file.size)]
            )
        ]
        shards = []
        sizes = (part.stop - part.start if part.size >= 0 else SHARD_BYTES for part in parts)
        for first, after in grouped(sizes, SHARD_BYTES):
            name = str(parts[first]) + (f" to {parts[after - 1]}" if after - first > 1 else "")
            shards.append(InputShard(name, {"parts": [list(part) for part in parts[first:after]]}))
        return shards

    def read(self, shard: InputShard) -> Iterator[Document]:
        for part in shard.read["parts"]:
            yield from self.read_part(Part(*part))

    def read_part(self, part: Part) -> Iterator[Document]:
        """The documents that begin in a part of a file."""
        raise NotImplementedError

    def count(self) -> int | None:
        return self.rows

    def identity(self) -> Any:
        named = [(resource(file.name), file.size, file.version) for file in self._files]
        files = [one if one[2] else one[:2] for one in named]
        digest = hashlib.blake2b(repr(files).encode(), digest_size=8).hexdigest()
        total = {"files": len(files), "bytes": sum(file.size for file in self._files), "names_and_sizes": digest}
        return {**total, **self._records.identity(), **self.about}


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """Raises what fails while a file is read or decompressed as `DataError`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        known = isinstance(error, OSError | EOFError | zlib.error)
        if not known and not type(error).__module__.startswith(("pyarrow", "urllib3")):
            raise
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise DataError(f"Cannot read {name}: {reason}. Check the file, or leave it out of the glob.") from error


class _Expanded:
    """A compressed file, of which at most `MOST_EXPANSION` times its size, and 16 MiB, are decompressed."""

    def __init__(self, part: Part, compressed: io.IOBase):
        self._name = part.name
        if part.name.endswith(".gz"):
            self._file: Any = gzip.GzipFile(fileobj=compressed)
        else:
            import pyarrow

            self._file = io.BufferedReader(pyarrow.CompressedInputStream(compressed, "zstd"), 2**20)
        self._left = MOST_EXPANSION * (part.size if part.size >= 0 else 2**30) + 2**24

    def _counted(self, content: bytes) -> bytes:
        self._left -= len(content)
        if self._left < 0:
            raise DataError(
                f"{self._name} expands to more than {MOST_EXPANSION} times its size, which no text does. Decompress it "
                "by hand and look at it, or leave it out of the glob."
            )
        return content

    def read(self, size: int) -> bytes:
        return self._counted(self._file.read(min(size, self._left + 1)))

    def readline(self, size: int) -> bytes:
        return self._counted(self._file.readline(min(size, self._left + 1)))


@contextlib.contextmanager
def _opened(part: Part) -> Iterator[Any]:
    """The file of a part, decompressed if its name says that it is compressed."""
    with reading(part.name), open_file(part.name, part.size) as file:
        yield _Expanded(part, file) if part.name.endswith(COMPRESSED) else file


class TextFiles(Files):
    """UTF-8 files, also compressed (.gz, .zst), one document each, without the byte order mark at their beginning.

    A file of more than `part_bytes` is several documents of nearly equal size, which end at line ends; where no line
    ends within `LINE_BYTES`, at a character. So a file is never in memory as a whole.
    """

    part_bytes = 2**24  # of a document

    def read_part(self, part: Part) -> Iterator[Document]:
        with _opened(part) as file:
            if part.size < 0 or not self.splits(part.name):
                yield from self._streamed(file, part.name)
                return
            start, stop = (self._cut(file, at, part.size) for at in (part.start, part.stop))
            file.seek(start)
            if text := self._text(file.read(stop - start), part.name, start):
                yield Document(text)

    def _cut(self, file: Any, at: int, size: int) -> int:
        """The byte at which the document begins that the byte `at` would begin."""
        if at in (0, size):
            return at
        file.seek(at - 1)
        content = file.read(LINE_BYTES)
        return at - 1 + (content.find(b"\n") + 1 or 1 + _character(content[1:5]))

    def _streamed(self, file: Any, name: str) -> Iterator[Document]:
        """The documents of a file whose size is not known before it is read."""
        begins, rest, most = 0, b"", self.part_bytes
        while content := file.read(most + LINE_BYTES - len(rest)):
            rest += content
            if len(rest) < most + LINE_BYTES:
                continue
            cut = rest.find(b"\n", most - 1) + 1 or most + _character(rest[most : most + 4])
            yield Document(self._text(rest[:cut], name, begins))
            begins, rest = begins + cut, rest[cut:]
        if text := self._text(rest, name, begins):
            yield Document(text)

    def _text(self, content: bytes, name: str, begins: int) -> str:
        """The bytes of a file from one on, as text."""
        try:
            return content.decode("utf-8" if begins else "utf-8-sig")
        except UnicodeDecodeError as error:
            at = begins + error.start + 3 * (not begins and content.startswith(codecs.BOM_UTF8))
            raise DataError(f"{name} is not UTF-8 (byte {at:,}). Convert it, or leave it out of the glob.") from error

    def count(self) -> int | None:
        if any(file.size < 0 or not self.splits(file.name) for file in self._files):
            return None
        return sum(len(split_evenly(file.size, self.part_bytes)) for file in self._files)


def _character(content: bytes) -> int:
    """The first byte of a text in UTF-8 that begins a character."""
    return next((i for i, byte in enumerate(content) if byte & 0xC0 != 0x80), len(content))


class JsonLines(Files):
    """Files of JSON lines, also compressed (.gz, .zst), one document per line."""

    def read_part(self, part: Part) -> Iterator[Document]:
        to_the_end = part.size < 0 or not self.splits(part.name)
        position, number = part.start, 0
        with _opened(part) as file:
            if position:  # the line before the part belongs to the part in which it begins
                file.seek(position - 1)
                position -= 1
                while piece := file.readline(LINE_BYTES):
                    position += len(piece)
                    if piece.endswith(b"\n"):
                        break
            while (position < part.stop or to_the_end) and (line := file.readline(MOST_LINE_BYTES + 1)):
                begins, number = position, number + 1
                if len(line) > MOST_LINE_BYTES:
                    where = self._where(part, begins, number)
                    raise DataError(
                        f"{where} has more than {MOST_LINE_BYTES:,} bytes. Split the record, or leave the file out of "
                        "the glob."
                    )
                position += len(line)
                if line.strip() and (document := self._document(line, part, begins, number)):
                    yield document

    def _document(self, line: bytes, part: Part, begins: int, number: int) -> Document | None:
        record = json_object(line)
        if record is None:
            where = self._where(part, begins, number)
            raise DataError(f"{where} is not a JSON object. Mend it, or leave the file out of the glob.")
        return self._records.document(record, lambda: self._where(part, begins, number))

    def _where(self, part: Part, begins: int, number: int) -> str:
        return f"{part.name}, " + (f"the line at byte {begins:,}" if part.start else f"line {number}")


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
        many = len(self._files) > MOST_COUNTED and any("://" in file.name for file in self._files)
        if self.rows is not None or many:
            return self.rows
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
