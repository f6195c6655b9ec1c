"""Datasets of the Hugging Face hub, or of a directory with the same layout.

The `datasets` library reads the dataset's README and finds its configs, splits and files. Parquet, Arrow and JSON lines
are then read as any other files are, in parts; every other format through `datasets`, a shard for each of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pe_lab.config import SourceConfig
from pe_lab.data.sources.files import COMPRESSED, ArrowFiles, Files, JsonLines, ParquetFiles
from pe_lab.data.sources.records import Records
from pe_lab.data.sources.source import DataSource, Document, InputShard
from pe_lab.errors import ConfigError, DataError, StoreError, UnsupportedError, UserError, excerpt, redacted
from pe_lab.storage import InputFile, at_home, find_files

FORMATS = {".parquet": ParquetFiles, ".arrow": ArrowFiles, ".jsonl": JsonLines, ".ndjson": JsonLines}
NO_CHANGE = ("name", "version", "data_dir", "data_files", "description", "features", "batch_size", "chunksize")
LISTED = 500  # files in a request for their sizes
LOGIN = "Accept its terms on its page, if it has any; then run `hf auth login`, or set HF_TOKEN."


class Address(NamedTuple):
    """What `hf:` names: a directory or a repository, a config ("": the default) and a split."""

    path: str
    config: str
    split: str

    @property
    def is_local(self) -> bool:
        return at_home(self.path).is_dir()


def parse_address(source: str, where: str) -> Address:
    """`ORG/NAME[:CONFIG][/SPLIT]` or `DIRECTORY[:CONFIG][/SPLIT]`; a directory that exists comes first."""
    path, colon, rest = where.partition(":")
    if colon:
        config, _, split = rest.partition("/")
        candidates = [Address(path, config, split or "train")]
    else:
        head, _, tail = where.rstrip("/").rpartition("/")
        candidates = [Address(where, "", "train"), Address(head, "", tail)]
    for each in candidates:
        if each.path and each.is_local:
            return each
    for each in candidates:
        if re.fullmatch(r"[\w.-]+/[\w.-]+", each.path) and re.fullmatch(r"[\w.-]+", each.split):
            return each
    raise ConfigError(
        f"data source {source!r}: there is no directory '{path}', and it is no repository. Use "
        "hf:ORG/NAME[:CONFIG][/SPLIT], or a directory in place of ORG/NAME."
    )


def open_hub(config: SourceConfig, where: str, records: Records) -> DataSource:
    """The source of `hf:`; `options` may have a `revision`: a branch, a tag or a commit.

    Raises:
      ConfigError: there is no such config, split or column.
      DataError: there is no such dataset, or it has no data files.
      StoreError: the dataset needs a login, or the hub cannot be reached.
      UnsupportedError: `datasets` is not installed.
    """
    try:
        import datasets
        import huggingface_hub
    except ImportError as error:
        raise UnsupportedError(
            f"data source {config.source!r} needs the package datasets: pip install 'pe-lab[hf]'."
        ) from error
    revision = config.options.get("revision")
    if not isinstance(revision, str | None):
        raise ConfigError(f"data source {config.source!r}: option revision is {revision!r}; it must be a string.")
    address = parse_address(config.source, where)
    path = str(at_home(address.path).absolute()) if address.is_local else address.path
    if address.is_local and glob.has_magic(path):
        raise UnsupportedError(
            f"data source {config.source!r}: the package datasets reads wildcards in the name of a directory, "
            f"'{path}'. Give the directory another name, or its files as jsonl:, parquet: or arrow:."
        )
    with _explained(config.source):
        try:
            builder = datasets.load_dataset_builder(path, address.config or None, revision=revision)
        except datasets.exceptions.DatasetNotFoundError:
            if not address.is_local:  # datasets does not tell why; the hub does
                huggingface_hub.HfApi().auth_check(address.path, repo_type="dataset")
            raise
        splits = {str(split): list(files) for split, files in (builder.config.data_files or {}).items()}
    if address.split not in splits:
        has = ", ".join(splits)
        raise ConfigError(f"data source {config.source!r}: it has no split {address.split!r} (it has: {has}).")
    files = splits[address.split]
    kind = _format(builder.config, files)
    if kind is None:
        return StreamedDataset(config.source, builder, address, records)
    with _explained(config.source):
        inputs = _inputs(config.source, files)
    if not any(file.size for file in inputs):
        raise DataError(f"data source {config.source!r} is empty: its {len(inputs)} file(s) have 0 bytes.")
    found = kind(config.source, inputs, records)
    found.rows, found.about = _examples(builder, address.split), _named(builder, address)
    return found


def _format(config: Any, files: Sequence[str]) -> type[Files] | None:
    """What reads the files; None if `datasets` has to, for their format or for settings in the README."""
    names = (file[: -len(Path(file).suffix)] if file.endswith(COMPRESSED) else file for file in files)
    suffixes = {Path(name).suffix for name in names}
    kinds = {FORMATS.get(suffix) for suffix in suffixes}
    for field in dataclasses.fields(config):
        default = field.default_factory() if callable(field.default_factory) else field.default
        if field.name not in NO_CHANGE and getattr(config, field.name) != default:
            return None
    return kinds.pop() if len(kinds) == 1 else None


def _inputs(source: str, files: Sequence[str]) -> list[InputFile]:
    """The files with their sizes; those of the hub by their addresses, in one revision."""
    named = [re.fullmatch(r"hf://datasets/([^@]+/[^@/]+)@([^/]+)/(.+)", file) for file in files]
    if not any(named):
        what = f"data source {source!r}"
        return [
            found
            for file in files
            for found in (find_files(what, file) if "://" in file else [InputFile(file, Path(file).stat().st_size)])
        ]
    if not all(named):
        raise DataError(
            f"data source {source!r} has files in several places, of which one is the hub. Use one of them."
        )
    import huggingface_hub

    api, found = huggingface_hub.HfApi(), []
    for first in range(0, len(named), LISTED):
        some = named[first : first + LISTED]
        repository, revision = some[0][1], some[0][2]
        listed = api.get_paths_info(repository, [each[3] for each in some], repo_type="dataset", revision=revision)
        sizes = {each.path: each.size for each in listed}
        for each in some:
            url = huggingface_hub.hf_hub_url(repository, each[3], repo_type="dataset", revision=revision)
            found.append(InputFile(url, sizes[each[3]]))
    return found


class StreamedDataset(DataSource):
    """A split that `datasets` reads, such as one of CSV files; its files are the shards."""

    def __init__(self, name: str, builder: Any, address: Address, records: Records):
        self.name, self._builder, self._address, self._records = name, builder, address, records
        with _explained(name):
            self._data = builder.as_streaming_dataset(split=address.split)
            columns = self._data.column_names or list(next(iter(self._data.take(1)), {}))
        records.check_columns(f"data source {name!r}", columns)
        # What is not used is not decoded: datasets may have images and sounds.
        self._data = self._data.select_columns(sorted(records.tops(columns)))

    def shards(self) -> list[InputShard]:
        number = self._data.num_shards
        return [
            InputShard(f"shard {i} of {number}", {"shard": i, "of": number, "version": self._builder.hash})
            for i in range(number)
        ]

    def read(self, shard: InputShard) -> Iterator[Document]:
        number = shard.read["shard"]
        if shard.read["version"] != self._builder.hash:
            raise DataError(
                f"data source {self.name!r} has changed since its shards were listed. List them again; option revision "
                "keeps a dataset of the hub as it was."
            )
        with _explained(self.name):
            for row, record in enumerate(self._data.shard(num_shards=shard.read["of"], index=number), start=1):
                where = f"data source {self.name!r}, shard {number}, row {row}"
                if (document := self._records.document(record, where)) is not None:
                    yield document

    def count(self) -> int | None:
        return _examples(self._builder, self._address.split)

    def identity(self) -> Any:
        files = self._builder.config.data_files[self._address.split]
        versions = [[str(part) for part in each] for each in getattr(files, "origin_metadata", [])]
        return {
            "files": list(map(redacted, files)),
            "versions": versions,
            **_named(self._builder, self._address),
            **self._records.identity(),
        }


def _examples(builder: Any, split: str) -> int | None:
    """The number of rows that the README of a dataset tells."""
    return (builder.info.splits or {})[split].num_examples if split in (builder.info.splits or {}) else None


def _named(builder: Any, address: Address) -> dict[str, Any]:
    revision = builder.hash if not address.is_local else None
    return {"config": builder.config.name, "split": address.split, **({"revision": revision} if revision else {})}


@contextlib.contextmanager
def _explained(source: str) -> Iterator[None]:
    """Raises what `datasets` and `huggingface_hub` raise as an error that says what to do."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:  # of any type
        raise explain(source, error) from error


def explain(source: str, error: BaseException) -> UserError:
    """What an error of `datasets` or `huggingface_hub` means for a user."""
    chain, current = [], error
    while current is not None:
        chain.append(current)
        current = current.__cause__ or current.__context__
    kinds = {kind.__name__ for each in chain for kind in type(each).__mro__}
    statuses = {getattr(getattr(each, "response", None), "status_code", None) for each in chain}
    what = f"data source {source!r}"
    text = next((line for line in str(error).strip().splitlines() if line.strip()), type(error).__name__)
    text = excerpt(text, 400)
    if "RepositoryNotFoundError" in kinds and "GatedRepoError" not in kinds:
        if 401 in statuses:  # the hub's answer to who has not logged in
            return StoreError(f"{what}: the hub has no such dataset, or it needs a login. Check its name. {LOGIN}")
        return DataError(f"{what}: the hub has no such dataset. Check its name.")
    if "GatedRepoError" in kinds or statuses & {401, 403}:
        return StoreError(f"{what} needs a login with access to it. {LOGIN}")
    if kinds & {"ConnectionError", "OfflineModeIsEnabled", "TransportError", "ConnectError", "TimeoutException"}:
        return StoreError(
            f"{what}: the hub cannot be reached ({text}). Check the network, or download the dataset elsewhere, "
            "and give its directory: hf:DIRECTORY."
        )
    if "HfHubHTTPError" in kinds:
        return StoreError(f"{what}: the hub does not answer as it should ({text}). Repeat the command once it does.")
    if isinstance(error, ValueError) and "onfig" in text:
        return ConfigError(f"{what}: {text} Name a config as in hf:ORG/NAME:CONFIG.")
    if kinds & {"DataFilesNotFoundError", "EmptyDatasetError"}:
        return DataError(f"{what} has no data files in a known format ({text}).")
    return DataError(f"{what} cannot be read: {text}")
