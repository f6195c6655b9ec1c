"""Analyses: numbers are those of the papers, pictures show these numbers, and bad input writes nothing."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import struct
from pathlib import Path

import numpy as np
import pytest

from pe_lab.analysis.analysis import items, whole
from pe_lab.analysis.frequencies import COMPARED, Settings, compute, incomplete_pairs
from pe_lab.analyze import ANALYSES, ELSEWHERE, load_analysis, main
from pe_lab.errors import UserError
from pe_lab.positional import Rope, frequencies
from pe_lab.results.findings import read_findings

ROOT = Path(__file__).parents[1]

DOCS = Path(__file__).parent.parent / "docs"
NAMES = ["frequency_scaling", "frequency_scaling_by_factor", "rotation_cache"]


def numbers_at(directory: Path) -> dict:
    return json.loads((directory / "frequencies.json").read_text())


def gammas(numbers: dict) -> dict[tuple[float, str], list[float]]:
    return {(c["factor"], c["variant"]): c["gamma"] for c in numbers["scaling"]["curves"]}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("analysis") / "new" / "frequencies"
    assert main(["frequencies", f"--out={out}"]) == 0
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Numbers. Expected ones are not pe_lab's: transformers printed them (d = 64, base 1e4, L = 2048, s = 2).


def test_scaling_factors_are_those_of_transformers(written):
    numbers = numbers_at(written)
    assert numbers["scaling"]["pairs"] == list(range(32))
    gamma = gammas(numbers)
    yarn, ntk, pi = (np.array(gamma[2, name]) for name in ("yarn", "ntk", "pi"))
    assert np.all(yarn[:9] == 1) and np.all(yarn[21:] == 0.5)
    assert yarn[[9, 10, 20]] == pytest.approx([0.9615, 0.9231, 0.5385], abs=5e-5)
    assert ntk[[0, 1, 15, 30, 31]] == pytest.approx([1, 0.9779, 0.7151, 0.5113, 0.5], abs=5e-5)
    assert np.all(pi == 0.5)
    attention = {c["variant"]: c["attention_factor"] for c in numbers["scaling"]["curves"] if c["factor"] == 2}
    assert attention == pytest.approx({"pi": 1, "ntk": 1, "yarn": 1.069315}, abs=5e-7)


def test_all_variants_compress_the_slowest_pair_by_the_factor(written):
    gamma = gammas(numbers_at(written))
    assert list(gamma) == [(s, name) for s in (2, 3, 4) for name in ("pi", "ntk", "yarn")]
    for (s, name), curve in gamma.items():
        assert curve[-1] == pytest.approx(1 / s)
        assert np.all(np.diff(curve) < 1e-12)  # slower pairs are never compressed less
        assert curve[0] == (pytest.approx(1 / s) if name == "pi" else 1)
    # DroPE's eq. 10 with m - 1 for m, by hand.
    assert gamma[4, "ntk"][10] == pytest.approx(0.25 ** (20 / 62))


@pytest.mark.parametrize(("length", "pairs"), [(32_000, 2), (14_900, 4), (14_899, 5), (2048, 11)])
def test_pairs_that_never_complete_a_rotation(length, pairs):
    """DroPE, section 4: "at least five" of its model at 32,000 tokens. Two do; five need 2 pi 10^(27/8) = 14,900."""
    assert incomplete_pairs(frequencies(Rope(base=1e4), 64)[0], length) == pairs


def test_eq_10_counts_pairs_from_1():
    """Taken with m = 1..d/2, the fastest pair would be slowed and the slowest more than s times; m - 1 is NTK."""
    (curve,) = compute(Settings(factors=(4.0,), variants=("ntk",))).scaling
    assert curve.gamma == pytest.approx([0.25 ** (2 * (m - 1) / 62) for m in range(1, 33)])
    assert curve.gamma[0] == 1 > 0.25 ** (2 * 1 / 62) and curve.gamma[-1] == pytest.approx(0.25)


def test_other_heads_move_yarns_ramp():
    # Bounds of the ramp by transformers: 20.944 and 45.027 for (128, 1e4, 4096), rounded outwards.
    (curve,) = compute(Settings(head_dim=128, length=4096, factors=(8.0,), variants=("yarn",))).scaling
    assert np.flatnonzero(np.array(curve.gamma) == 1)[-1] == 20
    assert np.flatnonzero(np.array(curve.gamma) > 1 / 8 + 1e-12)[-1] == 45
    # The clamp of 3.7705 and 11.798 for (64, 1e6, 1024): 3 and 12.
    (curve,) = compute(Settings(base=1e6, length=1024, factors=(2.0,), variants=("yarn",))).scaling
    assert np.flatnonzero(np.array(curve.gamma) == 1)[-1] == 3
    assert np.flatnonzero(np.array(curve.gamma) > 0.5 + 1e-12)[-1] == 11


def test_cache_bytes_by_hand(written):
    cache = numbers_at(written)["cache"]
    assert cache["lengths"][0] == 4096 and cache["lengths"][-1] == 10_000_000
    at = {c["fraction"]: dict(zip(cache["lengths"], c["bytes"], strict=True)) for c in cache["curves"]}
    # Table 1 of the paper: 1% to 100% of 256 channels.
    assert [c["rotated_channels"] for c in cache["curves"]] == [2, 26, 64, 128, 192, 256]
    assert at[1.0][4096] == 4_194_304 and at[1.0][1_048_576] == 1_073_741_824
    assert at[1.0][10_000_000] == 10_240_000_000
    assert at[0.1][10_000_000] == 1_040_000_000 and at[0.01][10_000_000] == 80_000_000
    assert at[0.5][4096] == 2_097_152


def test_the_variants_that_came_later():
    settings = Settings(factors=(2.0,), variants=tuple(COMPARED))
    curves = {curve.variant: curve for curve in compute(settings).scaling}
    for name, same in (("ntk_by_parts", "yarn"), ("dynamic_ntk", "ntk"), ("dynamic_yarn", "yarn")):
        if name in curves:
            assert curves[name].gamma == pytest.approx(curves[same].gamma)
    if "ntk_by_parts" in curves:
        assert curves["ntk_by_parts"].attention_factor == 1
    if "llama3" in curves:
        # By rotations in 2,048 tokens, kept above 4 and divided below 1: pair 15 rotates 4.35 times, 16 3.26 times, 20
        # 1.03 times, 21 0.77 times (2048 / 2 pi * 10000^(-i / 32)).
        gamma = np.array(curves["llama3"].gamma)
        assert np.all(gamma[:16] == 1) and np.all(gamma[21:] == 0.5) and np.all(gamma[16:21] < 1)


# ---------------------------------------------------------------------------------------------------------------------
# Pictures


def test_pictures_are_pngs_fit_for_a_page(tmp_path):
    assert main(["frequencies", f"--out={tmp_path}", "--format=png"]) == 0
    assert {p.name for p in tmp_path.glob("*.png")} == {f"{n}.png" for n in NAMES}
    for name in NAMES:
        content = (tmp_path / f"{name}.png").read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = struct.unpack(">II", content[16:24])
        assert width >= 1368 and height > 300
        assert 10_000 < len(content) < 400_000


def test_lines_hold_the_numbers(written):
    numbers = numbers_at(written)
    drawn = {figure.name: figure for figure in read_findings(written).findings.figures}
    assert list(drawn) == NAMES
    gamma = gammas(numbers)
    labels = {"PI": "pi", "NTK": "ntk", "YaRN": "yarn"}
    (alone,), panels = drawn["frequency_scaling"].panels, drawn["frequency_scaling_by_factor"].panels
    assert [name for name, _ in panels] == ["s = 2", "s = 3", "s = 4"]
    for (_, lines), factor in zip([alone, *panels], (2, 2, 3, 4), strict=True):
        assert [line.label for line in lines] == list(labels)
        for line in lines:
            assert line.x.tolist() == numbers["scaling"]["pairs"]
            assert line.y.tolist() == gamma[factor, labels[line.label]]
    ((_, lines),) = drawn["rotation_cache"].panels
    assert drawn["rotation_cache"].log_x and drawn["rotation_cache"].log_y
    cache = numbers["cache"]
    expected = {f"{100 * c['fraction']:g}%: {c['rotated_channels']} channels": c["bytes"] for c in cache["curves"]}
    assert {line.label: line.y.tolist() for line in lines} == expected
    assert all(line.x.tolist() == cache["lengths"] for line in lines)


def test_a_fraction_that_rotates_nothing_is_no_line(tmp_path):
    # 1% of 64 channels is less than one: `PartialRope` then rotates none, and a logarithmic axis has no place for 0.
    assert main(["frequencies", f"--out={tmp_path}", "--cache-head-dim=64"]) == 0
    nothing = numbers_at(tmp_path)["cache"]["curves"][0]
    assert nothing["rotated_channels"] == 0 and not any(nothing["bytes"])


def test_options_reach_the_analysis(tmp_path, capsys):
    arguments = (
        "--head-dim=128 --base=5e5 --length=8k --factors=8,16 --variants=ntk,pi --fractions=0.5 --format=svg,png"
    )
    assert main(["frequencies", "--out", str(tmp_path), *arguments.split(), "--cache-head-dim=128"]) == 0
    numbers = numbers_at(tmp_path)
    assert numbers["settings"] == {
        "head_dim": 128, "base": 5e5, "length": 8192, "factors": [8, 16], "variants": ["ntk", "pi"],
        "cache_head_dim": 128, "fractions": [0.5],
    }  # fmt: skip
    assert list(gammas(numbers)) == [(8, "ntk"), (8, "pi"), (16, "ntk"), (16, "pi")]
    assert numbers["scaling"]["curves"][0]["encoding"]["base"] == 5e5
    assert {p.suffix for p in tmp_path.iterdir()} == {".svg", ".png", ".json", ".npz"}
    assert (tmp_path / "rotation_cache.svg").read_text().startswith("<svg")
    out = capsys.readouterr().out
    assert all(str(path) in out for path in tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------------------------------
# The command


def test_the_table_shows_the_check_values(tmp_path, capsys):
    main(["frequencies", f"--out={tmp_path}"])
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines[:20]) <= 120
    head = lines[1].replace("pair 0", "0").replace("cos, sin x", "x").split()
    row = {line.split()[1]: dict(zip(head, line.split(), strict=True)) for line in lines if re.match(r"2 ", line)}
    assert row["YaRN"]["x"] == "1.069315"
    assert [row["YaRN"][pair] for pair in ("8", "9", "10", "20", "21", "31")] == [
        "1.0000", "0.9615", "0.9231", "0.5385", "0.5000", "0.5000"]  # fmt: skip
    assert [row["NTK"][pair] for pair in ("1", "15", "30", "31")] == ["0.9779", "0.7151", "0.5113", "0.5000"]
    full = next(line for line in lines if line.strip().startswith("100%"))
    assert full.split() == ["100%", "256", "4.19", "MB", "33.6", "MB", "134", "MB", "1.07", "GB", "10.2", "GB"]


@pytest.mark.parametrize("name", ANALYSES)
def test_an_analysis_of_models_has_a_function_that_measures(name):
    module = importlib.import_module(ELSEWHERE.get(name, f"pe_lab.analysis.{name}"))
    assert callable(getattr(module, "measure", None)) == (
        load_analysis(name).models and name != "dope"
    )  # it asks prompts


def test_help_lists_every_analysis_in_a_line(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    out = capsys.readouterr().out
    assert end.value.code == 0
    for name, summary in ANALYSES.items():
        assert any(name in line and summary in line for line in out.splitlines())
    assert "--head-dim" not in out
    with pytest.raises(SystemExit):
        main(["frequencies", "--help"])
    assert "--head-dim" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["frequncies"], "There is no analysis 'frequncies'. Did you mean 'frequencies'?"),
        (["frequncies", "--head-dim=64"], "Did you mean 'frequencies'?"),
        (["--head-dim=63"], "head_dim is 63; it must be even"),
        (["--head-dim=2"], "head_dim is 2; it must be even, from 4"),
        (["--head-dim=0"], "head_dim is 0"),
        (["--head-dim=1e9"], "head_dim is 1000000000"),
        (["--head-dim=64.5"], "--head-dim: '64.5' is not a whole number"),
        (["--head-dim=many"], "--head-dim: 'many' is not a number"),
        (["--head-dim="], "--head-dim is empty: give a value"),
        (["--cache-head-dim=-2"], "cache_head_dim is -2"),
        (["--base=1"], "base is 1.0; it must be above 1"),
        (["--base=nan"], "base is nan"),
        (["--length=0"], "length is 0"),
        (["--length=inf"], "--length: 'inf' is not a whole number"),
        (["--length=1e300"], "give the training length, 1 to 2147483648 tokens"),
        (["--factors=0.5"], "factors holds 0.5; each must lie between 1 and"),
        (["--factors=2,nan"], "factors holds nan"),
        (["--factors=1e308"], "factors holds 1e+308"),
        (["--factors=two"], "--factors: 'two' is not a number"),
        (["--factors=2,,3"], "--factors: '2,,3' has an empty place"),
        (["--factors=2,2.0"], "factors holds 2 values; give 1 to 12, all different"),
        (["--factors=" + ",".join(map(str, range(1, 15)))], "factors holds 14 values"),
        (["--fractions=0"], "fractions holds 0; each must lie above 0"),
        (["--fractions=10"], "fractions holds 10"),
        (["--fractions=0.001"], "None of the fractions rotates a channel of 256"),
        (["--variants=yran"], "there is no 'yran'. Did you mean 'yarn'?"),
        (["--format=pgn"], "--format: 'pgn' cannot be written. Did you mean 'png'?"),
        (["--out=ftp://bucket/x"], "addresses begin with gs:// or s3://"),
        (["--out=file"], "--out 'file' cannot be written (Not a directory)"),
        (["--out=file/inside"], "cannot be written"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, monkeypatch, capsys, arguments, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("kept")
    given = arguments if arguments[0] == "frequncies" else ["frequencies", *arguments]
    assert main(given) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1 and says in captured.err
    assert captured.out == ""
    assert [p.name for p in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("arguments", [[], ["--format=svg"], ["frequencies", "--factor=2"], ["--from=runs/a"]])
def test_a_command_line_of_another_form_ends_with_status_2(capsys, arguments):
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "--help lists the options" in said and said.count("\n") == 1


@pytest.mark.slow
def test_nothing_is_replaced_unless_all_of_it_can_be_written(tmp_path, monkeypatch, capsys):
    (tmp_path / "frequency_scaling.png").write_text("of before")
    (tmp_path / "rotation_cache.png").mkdir()
    assert main(["frequencies", "--format=png", f"--out={tmp_path}"]) == 2
    assert "a directory of that name exists" in capsys.readouterr().err
    (tmp_path / "rotation_cache.png").rmdir()

    real, calls = Path.write_bytes, []

    def full_disk(path: Path, content: bytes) -> int:
        calls.append(path)
        if len(calls) == 3:
            real(path, content[:100])
            raise OSError(28, "No space left on device", str(path))
        return real(path, content)

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    assert main(["frequencies", "--format=png", f"--out={tmp_path}"]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["frequency_scaling.png"]
    assert (tmp_path / "frequency_scaling.png").read_text() == "of before"


def test_numbers_on_a_command_line():
    assert [whole("--x", text) for text in ("2048", "1e4", "2k", "0.5K")] == [2048, 10000, 2048, 512]
    assert items("--x", "a, b") == ("a", "b")
    for text in ("k", "2.5", "nan", ""):
        with pytest.raises(UserError, match="--x"):
            whole("--x", text)


def test_the_figures_of_the_docs_are_those_of_the_commands_beside_them(tmp_path):
    text = (DOCS / "frequencies.md").read_text()
    commands = set(re.findall(r"^python -m pe_lab\.analyze (.*)$", text, flags=re.MULTILINE))
    assert commands and all(f"pictures/{name}.png" in text for name in NAMES)
    for line in commands:
        arguments = shlex.split(line)
        assert main([*arguments, f"--out={tmp_path}"]) == 0
    made, committed = numbers_at(tmp_path), numbers_at(DOCS / "pictures")
    assert made["settings"] == committed["settings"] and made["cache"] == committed["cache"]
    for key, curve in gammas(committed).items():
        assert gammas(made)[key] == pytest.approx(curve, rel=1e-12)
    assert gammas(made).keys() == gammas(committed).keys()


# --- The analysis `schedule`, a table --------------------------------------------------------------------------


def test_a_recipes_schedule_phase_by_phase(capsys):
    recipe = f"{ROOT}/configs/table1.py:method=rnope_swa"
    assert main(["schedule", f"--config={recipe}", "--config.model.layers=8"]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head == f"pretrain, QK-norm none: 14 query heads on 2 key heads of 64 channels, sequences of {1024:,} tokens"
    assert [re.split(r"  +", row)[0] for row in rows] == ["0-2,4-6", "3,7"]
    assert "window 256" in rows[0] and rows[1].split()[1] == "nope"
    assert main(["schedule", f"--config={ROOT}/configs/drope_16b.py"]) == 0
    out = capsys.readouterr().out
    assert "recalibrate, QK-norm none" in out and out.count("0-23") == 2


def test_a_schedule_of_texts_follows_the_length(capsys):
    texts = "--positional=dynamic_ntk:original_length=1024/heads=1:nope+nope/beta=0.412@1024"
    scales = {}
    for length in ("1k", "4k"):
        assert main(["schedule", texts, f"--length={length}"]) == 0
        rows = capsys.readouterr().out.splitlines()[2:]
        assert len(rows) == 2 and "heads 1: nope" in rows[0] and "split" in rows[0]
        scales[length] = re.split(r"  +", rows[1])[7]
    assert scales == {"1k": "1", "4k": "1.571"}  # 1 + 0.412 ln 4


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give one"),
        (["--positional=rope", "--config=configs/table1.py"], "give one"),
        (["--positional=rpoe"], "Did you mean 'rope'?"),
        (["--positional=rope", "--model=lama_1b"], "Did you mean 'llama_1b'?"),
        (["--positional=rope", "--length=many"], "--length: 'many' is not a number"),
        (["--positional=rope", "--config.model.layers=2"], "there is no --config here"),
        (["--config=nowhere.py"], "there is no file 'nowhere.py'"),
    ],
)
def test_a_schedule_that_cannot_be_shown_says_why(capsys, arguments, says):
    assert main(["schedule", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and says in err


def test_the_tables_of_the_docs_are_what_their_commands_print(monkeypatch, capsys):
    """Every `schedule` command of docs/encodings.md, and the block of text that stands with it."""
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs/encodings.md").read_text()
    found = re.findall(r"```shell\n(python -m pe_lab\.analyze schedule .*)\n```\n\n```text\n([^`]+)```", text)
    assert found
    for line, table in found:
        assert main(shlex.split(line)[3:]) == 0
        assert capsys.readouterr().out == table
