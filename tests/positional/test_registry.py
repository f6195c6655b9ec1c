"""Encodings from files of one's own: registering, digests of sources, and what a checkpoint's record refuses."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pe_lab.errors import EncodingError, UserError
from pe_lab.positional import Encoding, check_sources, import_encodings, layers, register, sources
from pe_lab.positional.registry import ENCODINGS

SOURCE = '''
"""A module."""

from __future__ import annotations
from dataclasses import dataclass
import jax.numpy as jnp
from pe_lab.positional import Encoding, register

SCALE = 2.0
OTHER = 3.0


def helper(x):
    """Text."""
    return SCALE * x


@register("NAME"MORE)
@dataclass(frozen=True)
class Mine(Encoding):
    """Text."""

    strength: float = 1.0

    def sink(self, params):
        return helper(jnp.zeros(4))  # a comment
'''


@pytest.fixture(autouse=True)
def same_registry():
    before = dict(ENCODINGS)
    yield
    ENCODINGS.clear()
    ENCODINGS.update(before)


def imported(path, name, *changes, more=""):
    text = SOURCE.replace("NAME", name).replace("MORE", more)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    import_encodings(str(path))
    return ENCODINGS[name]


def record(kind):
    return sources([kind()])


def test_a_file_gives_a_name_to_recipes_and_texts(tmp_path):
    kind = imported(tmp_path / "mine.py", "outside_1")
    (layer,) = layers("rope/with=outside_1:strength=3", 1)
    assert layer.extras == (kind(3.0),)
    (entry,) = record(kind).values()
    assert entry["file"] == str(tmp_path / "mine.py") and len(entry["digest"]) == 16
    assert sources([layers("rope", 1)[0].encoding]) == {}  # pe_lab's own


def test_a_file_that_is_read_again_gives_equal_instances(tmp_path):
    first = imported(tmp_path / "mine.py", "outside_2")
    assert imported(tmp_path / "mine.py", "outside_2") is first


def test_a_file_that_has_changed_is_refused_until_its_author_says_that_it_computes_the_same(tmp_path):
    recorded = record(imported(tmp_path / "mine.py", "outside_3"))
    change = ("SCALE = 2.0", "SCALE = 2.5")  # of what the class uses by way of its helper
    imported(tmp_path / "mine.py", "outside_3", change)
    with pytest.raises(EncodingError, match="'x' was made with another source of the encoding 'outside_3'"):
        check_sources(recorded, "The checkpoint 'x'")
    digest = recorded["outside_3"]["digest"]
    imported(tmp_path / "mine.py", "outside_3", change, more=f", same_as='{digest}'")
    check_sources(recorded, "The checkpoint 'x'")


def test_a_missing_module_is_named(tmp_path):
    recorded = record(imported(tmp_path / "mine.py", "outside_4"))
    del ENCODINGS["outside_4"]
    with pytest.raises(EncodingError, match=f"uses the encoding 'outside_4'.*--encodings={tmp_path}/mine.py"):
        check_sources(recorded, "The checkpoint 'x'")


def test_a_name_that_is_taken_is_refused(tmp_path):
    imported(tmp_path / "one.py", "outside_5")
    with pytest.raises(UserError, match="'outside_5'.*taken by Mine of .*one.py; give Mine of .*two.py another"):
        imported(tmp_path / "two.py", "outside_5")
    with pytest.raises(UserError, match="'rope'.*taken by Rope"):
        imported(tmp_path / "three.py", "rope")
    with pytest.raises(UserError, match="'yarn' is the name of Yarn already; give Mine another one"):
        imported(tmp_path / "four.py", "yarn")


def test_what_is_no_encoding_is_refused():
    with pytest.raises(UserError, match="no class derived from"):
        register("outside_6")(int)
    with pytest.raises(UserError, match=r"no frozen dataclass; write @dataclass\(frozen=True\)"):
        register("outside_6")(type("Bare", (Encoding,), {}))
    with pytest.raises(UserError, match="letters, digits and _"):
        register("out side")(dataclass(frozen=True)(type("Named", (Encoding,), {})))
    short = type("Short", (Encoding,), {"bias": lambda self, params, distance: 0})
    with pytest.raises(UserError, match=r"Short.bias takes \(self, params, distance\); it must take \(self, params, q"):
        register("outside_6")(dataclass(frozen=True)(short))


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nowhere.py", "there is no file 'nowhere.py'"),
        ("no_such_module", "No module named 'no_such_module'"),
    ],
)
def test_a_file_that_is_not_there_is_named(reference, message):
    with pytest.raises(UserError, match=message):
        import_encodings(reference)


def test_what_a_file_raises_is_one_message(tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(UserError, match="broken.py' raises ZeroDivisionError: division by zero"):
        import_encodings(str(tmp_path / "broken.py"))
