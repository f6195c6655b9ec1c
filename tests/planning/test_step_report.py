"""The report of a compiled step: its bounds by hand, the comparison with another, and its file."""

import dataclasses
import json
import re

import pytest

from pe_lab.errors import ConfigError
from pe_lab.parallel.topology import Chip
from pe_lab.planning.hlo import Buffer
from pe_lab.planning.report import (
    MIB,
    StepReport,
    Traffic,
    _products,
    bounds,
    compare,
    read_report,
    report_json,
    report_text,
)

CHIP = Chip("chip", memory=2**34, peak=1e14, bandwidth=1e12, ici=1e11, dcn=1e9)
REPORT = StepReport(
    program="tiny, phase 'one', on 2 x v5e:2x2",
    devices=8,
    settings={"remat": "dots", "loss_chunks": 8},
    compiler="libtpu 1",
    compile_seconds=12.3,
    peak_bytes=4 * 10**9,
    product_flops=9e12,
    attention_flops=1e12,
    model_flops=8e12,
    memory_bytes=50 * 10**9,
    memory_by_source={"loss": 30 * 10**9, "": 20 * 10**9},
    kernels={"splash_fwd": 24, "splash_dkv": 24},
    traffic=(
        Traffic("all-gather", "fsdp", "ICI", 24, 100 * MIB, 80 * MIB, 60 * MIB, "mlp/gate"),
        Traffic("reduce-scatter", "fsdp", "ICI", 24, 50 * MIB, 40 * MIB, 0, "mlp/gate, backward"),
        Traffic("all-reduce", "data", "DCN", 1, 10 * MIB, 10 * MIB, 10 * MIB, "loss", 10 * MIB),
    ),
    buffers=(Buffer(912 * MIB, "bf16[24,4096,4864]", "mlp/gate"),),
)


def test_the_least_time_by_each_resource():
    assert bounds(REPORT, CHIP) == {
        "compute": pytest.approx(0.1),
        "HBM": pytest.approx(0.05),
        "ICI": pytest.approx(120 * MIB / 1e11),
        "DCN": pytest.approx(10 * MIB / 1e9),
    }
    assert bounds(REPORT, Chip("unknown")) == {}


def test_a_ring_over_two_nodes_uses_both_networks():
    ring = Traffic("all-gather", "fsdp", "ICI+DCN", 1, 90 * MIB, 80 * MIB, 20 * MIB, "mlp/up", 10 * MIB)
    report = dataclasses.replace(REPORT, traffic=(ring,))
    assert [report.wire(), report.wire("ICI"), report.wire("DCN")] == [80 * MIB, 80 * MIB, 10 * MIB]
    assert report.wire("DCN", overlapped=True) == 2.5 * MIB and report.wire("ICI", overlapped=False) == 60 * MIB
    gpu = dataclasses.replace(CHIP, name="NVIDIA H100 80GB")
    assert "NVLink+network" in report_text(report, gpu) and "ICI" not in report_text(report, gpu)


def test_the_text_names_what_bounds_the_step():
    text = report_text(REPORT, CHIP)
    # 8e12 FLOPs of the model in 0.1 s of a peak of 1e14; 60 MiB are waited for.
    waited = 60 * MIB / 1e11
    assert f"bound by compute: MFU is at most 80.0% (full); {0.08 / (0.1 + waited):.1%} if" in text
    assert "all: 130.0 MiB sent, 54% of it beside computation" in text
    assert "kernels: splash_fwd x 24, splash_dkv x 24" in text
    assert re.search(r"loss +27\.9 +60%\n- +18\.6 +40%", text)
    rows = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert rows["mlp/gate, backward"][-5:] == ["ICI", "24", "50.0", "40.0", "0%"]
    assert rows["loss"][-5:] == ["DCN", "1", "10.0", "10.0", "100%"]
    slow = dataclasses.replace(REPORT, memory_bytes=10**12)
    assert "bound by HBM: MFU is at most 8.0%" in report_text(slow, CHIP)


def test_a_sentence_says_what_limits_the_step():
    text = report_text(dataclasses.replace(REPORT, causal_flops=5e12), CHIP)
    assert "MFU is at most 80.0% (full), 50.0% (causal);" in text
    assert "What limits the step is compute: 90% of its FLOPs are those of other products. At the peaks" in text
    assert "busy for a part of that time: HBM 50%, ICI 1%, DCN 10%." in text
    long = dataclasses.replace(REPORT, attention_flops=2.7e13)
    assert "is compute: 75% of its FLOPs are those of attention." in report_text(long, CHIP)
    slow = dataclasses.replace(REPORT, memory_bytes=10**12, memory_by_source={"loss": 3, "": 1})
    assert "What limits the step is HBM: 75% of its bytes in HBM are those of loss." in report_text(slow, CHIP)
    network = report_text(REPORT, dataclasses.replace(CHIP, ici=1e6, dcn=0.0, name="NVIDIA H100 80GB"))
    assert "What limits the step is NVLink: 67% of its bytes sent are those of mlp/gate." in network


def test_products_of_kernels():
    """Over the visible pairs: 2 forward, 3 for the gradient of queries, 4 for that of keys, 5 for both at once."""
    tpu, gpu = ("gradient_query", "gradient_key"), ("query_gradient", "key_gradient")
    for queries, keys in (tpu, gpu):
        runs = {f"pe_lab_attention_{name}": 24 for name in ("flash", queries, keys)}
        assert [_products(name, runs) for name in runs] == [2, 3, 4]
    splash = {"splash_mha_fwd_residuals": 1, "splash_mha_dq_no_residuals": 1, "splash_mha_dkv_no_residuals": 1}
    assert [_products(name, splash) for name in splash] == [2, 3, 4]
    cudnn = ("dot_product_attention_fwd", "dot_product_attention_bwd")
    assert [_products(name, dict.fromkeys(cudnn, 1)) for name in cudnn] == [2, 5]


def test_more_rows_than_are_shown_are_summed():
    text = report_text(REPORT, CHIP, rows=1)
    assert "and 2 others, 50.0 MiB" in text and "and 1 other, 18.6 GiB" in text


@pytest.mark.parametrize(
    ("change", "worse"),
    [
        ({}, False),
        ({"peak_bytes": int(4.03 * 10**9)}, False),
        ({"peak_bytes": int(4.05 * 10**9)}, True),
        ({"kernels": {"splash_fwd": 48, "splash_dkv": 24}}, True),
        ({"traffic": REPORT.traffic[:2]}, False),
        ({"traffic": (dataclasses.replace(REPORT.traffic[0], overlapped=0), *REPORT.traffic[1:])}, True),
        ({"memory_bytes": 60 * 10**9}, True),
    ],
)
def test_a_figure_that_is_over_a_percent_worse(change, worse):
    text, found = compare(dataclasses.replace(REPORT, **change), REPORT)
    assert found == worse
    assert "against tiny, phase 'one', on 2 x v5e:2x2 by libtpu 1 (remat dots, loss_chunks 8)" in text


def test_a_report_is_read_from_its_file_or_from_that_of_a_plan(tmp_path):
    alone, planned, other = (tmp_path / name for name in ("alone.json", "plan.json", "other.json"))
    alone.write_text(json.dumps(report_json(REPORT)))
    planned.write_text(json.dumps({"compiled": {"a": {"fits": True}, "b": {"step": report_json(REPORT)}}}))
    assert read_report(alone) == read_report(planned) == REPORT
    other.write_text(json.dumps({"compiled": {}}))
    with pytest.raises(ConfigError, match="is no report of a step. Write one with --explain"):
        read_report(other)
    with pytest.raises(ConfigError, match="none.json: No such file"):
        read_report(tmp_path / "none.json")
