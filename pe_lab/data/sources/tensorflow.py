"""TensorFlow Datasets, read without TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pe_lab.data.sources.records import Records
from pe_lab.data.sources.source import SHARD_BYTES, DataSource, Document, InputShard, split_evenly
from pe_lab.errors import ConfigError, DataError


class TensorFlowDataset(DataSource):
    """`tfds:NAME[/CONFIG][/SPLIT]`, prepared as array_record and read without TensorFlow.

    The split is `train` by default. `options`: `data_dir`, the directory of the datasets.
    """

    def __init__(self, name: str, where: str, records: Records, options: Any):
        import tensorflow_datasets as tfds

        self.name, self._records = name, records
        data_dir = options.get("data_dir")
        if not isinstance(data_dir, str | None):
            raise ConfigError(f"data source {name!r}: option data_dir is {data_dir!r}; it must be a directory's path.")
        self._builder, self._split = self._find(tfds, where, data_dir)
        try:
            self._data = self._builder.as_data_source(split=self._split)
        except Exception as error:
            raise DataError(f"data source {name!r} has no random access: {_first_line(error)}") from error
        records.check_columns(f"data source {name!r}", self._builder.info.features)
        if not len(self._data):
            raise DataError(f"data source {name!r} is empty: split {self._split!r} has no examples.")

    def _find(self, tfds: Any, where: str, data_dir: str | None) -> tuple[Any, str]:
        head, _, tail = where.rpartition("/")
        candidates = [(where, "train")] + ([(head, tail)] if head else [])
        failures = []
        for dataset, split in candidates:
            try:
                builder = tfds.builder(dataset, data_dir=data_dir)
            except Exception as error:  # of any type: from the registry or the file system
                failures.append(_first_line(error))
                continue
            if not builder.info.splits:
                raise DataError(
                    f"data source {self.name!r}: {dataset} is not prepared under {builder.data_dir}. "
                    f"Run: tfds build {dataset} --file_format=array_record"
                )
            if split.partition("[")[0] not in builder.info.splits:
                has = ", ".join(builder.info.splits)
                raise ConfigError(f"data source {self.name!r}: {dataset} has no split {split!r} (it has: {has}).")
            return builder, split
        raise ConfigError(f"data source {self.name!r}: TensorFlow Datasets finds no such dataset: {failures[0]}")

    def shards(self) -> list[InputShard]:
        examples = len(self._data)
        all_examples = sum(split.num_examples for split in self._builder.info.splits.values())
        example_bytes = max(1, int(self._builder.info.dataset_size) // max(1, all_examples))
        ranges = split_evenly(examples, max(1, SHARD_BYTES // example_bytes))
        return [InputShard(f"examples {a} to {b - 1}", {"examples": [a, b]}) for a, b in ranges]

    def read(self, shard: InputShard) -> Iterator[Document]:
        for index in range(*shard.read["examples"]):
            where = f"data source {self.name!r}, example {index}"
            if (document := self._records.document(self._data[index], where)) is not None:
                yield document

    def count(self) -> int | None:
        return len(self._data)

    def identity(self) -> Any:
        info = self._builder.info
        sizes = {"examples": len(self._data), "bytes": int(info.dataset_size)}
        return {"dataset": info.full_name, "split": self._split, **sizes, **self._records.identity()}


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
