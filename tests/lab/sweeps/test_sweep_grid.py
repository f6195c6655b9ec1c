"""The grid of a sweep: values, seeds, the product, names of directories."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pe_lab.errors import ConfigError
from pe_lab.lab.sweeps.cells import (
    cell_name,
    label,
    parse_axes,
    parse_seeds,
    product,
    split_values,
    with_arguments,
)
from pe_lab.recipes import recipe_arguments

WORDS = st.text("abc1.-:=", min_size=1, max_size=6)
QUOTED = st.text("ab,([]", max_size=6).map(lambda text: f"'{text}'")
NESTED = st.lists(WORDS | QUOTED, max_size=3).map(lambda items: f"[{','.join(items)}]")


@settings(max_examples=60)
@given(st.lists(WORDS | QUOTED | NESTED, min_size=1, max_size=4))
def test_values_are_split_where_they_were_joined(values):
    assert split_values(", ".join(values), "--grid x") == values


@settings(max_examples=15)
@given(st.lists(st.text(min_size=1, max_size=70), min_size=2, max_size=3, unique=True))
def test_every_value_has_a_directory_of_its_own(values):
    names = {cell_name({"data.sources": repr(value)}, 0) for value in values}
    assert len(names) == len(values)
    assert all(re.fullmatch(r"sources=[A-Za-z0-9.=+-]+__seed=0", name) and len(name) < 100 for name in names)


def test_axes():
    assert parse_axes(["model.layers=2, 4", ":method=rope,yarn", "phases.0.positional='rope:base=1e4,x=0.5',nope"]) == {
        "model.layers": ("2", "4"),
        ":method": ("rope", "yarn"),
        "phases.0.positional": ("'rope:base=1e4,x=0.5'", "nope"),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model.layers", "write KEY=VALUE,VALUE"),
        ("=1,2", "write KEY=VALUE,VALUE"),
        ("model..layers=1", "write KEY=VALUE,VALUE"),
        ("model.layers=", "a value is missing"),
        ("model.layers=1,,2", "a value is missing"),
        ("model.layers=1,2,1", "1 is given twice"),
        ("phases.0.positional='rope", "''' is missing at the end"),
        ("checkpoint.milestones=[1,2", "']' is missing at the end"),
    ],
)
def test_axes_that_are_refused(text, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_axes([text])


def test_a_key_has_one_axis():
    with pytest.raises(ConfigError, match="a is given twice"):
        parse_axes(["a=1", "a=2"])


def test_seeds():
    assert [parse_seeds(text) for text in ("3", "0,5, 7", "7,")] == [(0, 1, 2), (0, 5, 7), (7,)]


@pytest.mark.parametrize("text", ["0", "", ",", "1,,2", "x", "-1", "1,1", "99999999999,1", "20000", "²", "1.5"])
def test_seeds_that_are_refused(text):
    with pytest.raises(ConfigError, match="--seeds="):
        parse_seeds(text)


def test_seeds_vary_fastest():
    cells = product({"a": ("1", "2"), "b": ("x", "y")}, (0, 1))
    assert len(cells) == 8 and cells[:3] == [
        ({"a": "1", "b": "x"}, 0),
        ({"a": "1", "b": "x"}, 1),
        ({"a": "1", "b": "y"}, 0),
    ]
    assert product({"a": ("1",)}, ()) == [({"a": "1"}, None)]


@pytest.mark.parametrize(
    ("axes", "seeds", "message"),
    [
        ({"data.seed": ("1", "2")}, (0, 1), "set the same key"),
        ({key: tuple(map(str, range(101))) for key in "ab"}, (), "10,201 cells"),
    ],
)
def test_products_that_are_refused(axes, seeds, message):
    with pytest.raises(ConfigError, match=message):
        product(axes, seeds)


def test_names_tell_what_the_settings_differ_in():
    rates = {"phases.0.optimizer.learning_rate": "1e-3", "model.layers": "4"}
    assert cell_name(rates, 2) == "learning_rate=1e-3__layers=4__seed=2"
    assert cell_name({"phases.0.steps": "1", "phases.1.steps": "2", ":method": "rope"}, None) == (
        "0.steps=1__1.steps=2__method=rope"
    )
    many = [cell_name({f"x{n}": f"{end:x<50}" for n in range(9)}, 0) for end in "ab"]  # file systems take 255 bytes
    assert many[0] != many[1] and max(map(len, many)) <= 200
    assert label({"phases.0.positional": "'rope:base=1,fraction=0.5'"}) == "positional=rope:base=1,fraction=0.5"


def test_arguments_of_the_recipe():
    assert with_arguments("x.py", {":method": "rope", "model.layers": "2"}) == "x.py:method=rope"
    assert with_arguments("x.py:size=laptop", {":method": "'a'"}) == "x.py:size=laptop,method=a"
    assert with_arguments("x.py", {":": "quick"}) == "x.py:quick"
    with_comma = with_arguments("x.py", {":data": "'text:{a,b}'", ":note": '"it\'s a, b"'})
    given = recipe_arguments(with_comma.partition(":")[2], data="", note="")
    assert given == {"data": "text:{a,b}", "note": "it's a, b"}
    for recipe, key in (("x.py:method=a", ":method"), ("x.py:quick", ":")):
        with pytest.raises(ConfigError, match="has this argument already"):
            with_arguments(recipe, {key: "b"})
