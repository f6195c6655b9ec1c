"""Corpora: the standard library, packages of Debian, files of text and records, the hub, TensorFlow Datasets."""

from __future__ import annotations

from pe_lab import storage
from pe_lab.config import SourceConfig
from pe_lab.data.sources.debian import open_packages
from pe_lab.data.sources.files import ArrowFiles, JsonLines, ParquetFiles, TextFiles
from pe_lab.data.sources.hub import open_hub
from pe_lab.data.sources.manuals import MANUALS
from pe_lab.data.sources.prose import PROSE
from pe_lab.data.sources.records import Records
from pe_lab.data.sources.source import DataSource, Document, InputShard
from pe_lab.data.sources.standard_library import StandardLibrary
from pe_lab.data.sources.tensorflow import TensorFlowDataset
from pe_lab.errors import ConfigError, did_you_mean

OF_FILES = {"text": TextFiles, "jsonl": JsonLines, "parquet": ParquetFiles, "arrow": ArrowFiles}
OF_PACKAGES = {"prose": PROSE, "manuals": MANUALS}
WITHOUT_ADDRESS = ("stdlib", *OF_PACKAGES)
KINDS = (*WITHOUT_ADDRESS, *OF_FILES, "hf", "tfds")
OPTIONS = {"hf": ("revision",), "tfds": ("data_dir",)}
FORMS = (
    "stdlib, prose, manuals, text:GLOB, jsonl:GLOB, parquet:GLOB, arrow:GLOB, hf:ORG/NAME[:CONFIG][/SPLIT] or "
    "tfds:NAME[/SPLIT]"
)


def open_source(config: SourceConfig) -> DataSource:
    """The source named in a config.

    Raises:
      ConfigError: the kind, a column, the template or the chat is none.
      DataError: no file matches, or a file is of another kind.
    """
    kind, _, where = config.source.partition(":")
    allowed = OPTIONS.get(kind, ())
    for option in config.options:
        if kind in KINDS and option not in allowed:
            advice = did_you_mean(str(option), allowed) if allowed else "This kind of source has no options."
            raise ConfigError(f"data source {config.source!r}: unknown option {option!r}. {advice}")
    if kind not in KINDS:
        raise ConfigError(
            f"data source {config.source!r}: unknown kind {kind!r}. "
            f"{did_you_mean(kind, (*KINDS, 'needles', 'prepared', 'grain'))} Use {FORMS}, prepared:DIR, "
            "grain:FILE.py:FUNCTION or needles."
        )
    if bool(where) == (kind in WITHOUT_ADDRESS):
        raise ConfigError(f"data source {config.source!r} is incomplete. Use {FORMS}.")
    if kind in (*WITHOUT_ADDRESS, "text") and (config.template or config.chat):
        setting = "template" if config.template else "chat"
        raise ConfigError(f"data source {config.source!r} has no columns; leave its {setting} out.")
    if kind == "stdlib":
        return StandardLibrary()
    records = Records(config)
    if kind in OF_PACKAGES:
        return open_packages(OF_PACKAGES[kind], records)
    if kind == "hf":
        return open_hub(config, where, records)
    if kind == "tfds":
        return TensorFlowDataset(config.source, where, records, config.options)
    return OF_FILES[kind](config.source, storage.find_files(f"data source {config.source!r}", where), records)
