"""JSON lines that are parsed together are the same records as each line by itself."""

import pytest

from pe_lab.errors import DataError
from pe_lab.storage import json_object, read_records
from pe_lab.storage.json_files import json_objects

HALVES = [b'{"step": [{"a": 1}', b'{"b": 2}]}']  # of an object, each with the beginning and the end of one


@pytest.mark.parametrize(
    "others",
    [
        [b'{"step": 1}, {"step": 2}'],
        [b'{"step": 1},0,{"step": 2}'],  # as if the file knew what stands between lines
        [b'{"step": 1}', b'{"step": 2}'],
        [],
    ],
)
def test_halves_of_an_object_on_two_lines_are_none(others, tmp_path):
    for lines in ([*others, *HALVES], [*HALVES, *others]):
        assert list(json_objects(lines)) == list(map(json_object, lines))
        path, first = tmp_path / "records.jsonl", list(map(json_object, lines)).index(None) + 1
        path.write_bytes(b"\n".join(lines))
        with pytest.raises(DataError, match=f"records.jsonl, line {first}, is no record"):
            list(read_records(path))


def test_whole_lines_are_parsed_together():
    lines = [b' {"step": %d, "of": [{}, 0]}\r' % step for step in range(2500)]
    found = list(json_objects(lines))
    assert found == [{"step": step, "of": [{}, 0]} for step in range(2500)]
    assert len({id(key) for record in found[:1000] for key in record}) == 2  # the keys are the same strings
