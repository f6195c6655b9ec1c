"""Makes the tokenizer_*_golden.json beside it: token ids by transformers, sentencepiece and llama.cpp.

Run it with the project's Python, and name Pythons that have the others (each run prints the versions it used):

    python tests/data/make_tokenizer_golden.py --transformers5=P5 --transformers4=P4 [--llama-cpp=PL]

P5 has transformers 5; P4 has transformers 4.56, sentencepiece and protobuf (for the slow LlamaTokenizer); PL has
llama-cpp-python; without it the file of GGUF stays. The tokenizers are tiny, trained here on TRAINING; SmolLM2's GGUF
comes from tests/real_material.py. The unigrams come out differently from run to run: the file has those of one run.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]

from real_material import smollm2_gguf  # noqa: E402

from pe_lab.data.tokenizers.gguf import PRE_TOKENIZERS  # noqa: E402
from pe_lab.data.tokenizers.tokenizer import DIFFICULT  # noqa: E402

TRAINING = [
    "The quick brown fox jumps over the lazy dog. I'm sure you're not, we'll see: it's 12 or 1234 of them.\n",
    "def f(x: int) -> str:\n    return str(x)  # naïve\n\nclass A(B):\n\tpass\n",
    "日本語のテキスト 中文文本 한국어 Привет, мир! مرحبا שלום नमस्ते\n",
    "Hello world and more spaces, hello tokens and token ids; camelCase snake_case    indented\n",
] * 20

TRANSFORMERS = """
import json, os, sys
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
import transformers
directory, kind = sys.argv[1:]
texts = json.load(sys.stdin)
if kind == "slow":
    tokenizer = transformers.LlamaTokenizer.from_pretrained(directory)
    assert not tokenizer.is_fast
else:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
prompts = [tokenizer(text)["input_ids"] for text in texts]
print(json.dumps({"prompts": prompts, "by": "transformers " + transformers.__version__}))
"""
LLAMA_CPP = """
import json, sys
import llama_cpp
texts = json.load(sys.stdin)
model = llama_cpp.Llama(sys.argv[1], vocab_only=True, verbose=False)
def ids(text, whole):
    return model.tokenize(text.encode(), add_bos=whole, special=whole) if text else []
out = {"prompts": [ids(t, True) for t in texts], "documents": [ids(t, False) for t in texts]}
print(json.dumps({**out, "by": "llama-cpp-python " + llama_cpp.__version__}))
"""


def ask(python: str, program: str, *arguments: str) -> dict:
    given = json.dumps(DIFFICULT)
    done = subprocess.run([python, "-c", program, *arguments], input=given, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.strip().splitlines()[-1])


def digest(ids: list[int]) -> str:
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:12]


def byte_level(special: list[str]):
    import tokenizers
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    words += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    cut = pre_tokenizers.Split(Regex(words), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    return tokenizer


def metaspace_bpe():
    """The shape of Llama 2's tokenizer.json: spaces made visible by a normalizer, bytes for unknown characters."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, processors, trainers

    made = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    first = tokenizers.Tokenizer(models.BPE())
    first.normalizer = made
    first.train_from_iterator(TRAINING, trainers.BpeTrainer(vocab_size=260, show_progress=False, max_token_length=8))
    learned = json.loads(first.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *learned["vocab"]]
    merges = [tuple(m) for m in learned["merges"]]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = made
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    return tokenizer


def unigram():
    """The shape of T5's tokenizer.json."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=250, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", "$A </s> $B </s>", [("</s>", 1)])
    return tokenizer


def styles() -> dict[str, dict[str, str]]:
    from tokenizers import pre_tokenizers, processors

    fast = {"tokenizer_class": "PreTrainedTokenizerFast"}
    llama3 = byte_level(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
    template = processors.TemplateProcessing(
        "<|begin_of_text|> $A", "<|begin_of_text|> $A <|begin_of_text|> $B", [("<|begin_of_text|>", 0)]
    )
    llama3.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    flagged = byte_level(["<|endoftext|>", "<|im_start|>"])
    size = flagged.get_vocab_size()
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = {
        "0": {**plain, "content": "<|endoftext|>"},
        "1": {**plain, "content": "<|im_start|>"},
        str(size): {**plain, "content": "<|im_end|>", "lstrip": True, "rstrip": True},
        str(size + 1): {**plain, "content": "token", "single_word": True, "special": False},
        str(size + 2): {**plain, "content": "Mixed", "special": False, "rstrip": True},
        str(size + 3): {**plain, "content": "<s>", "special": False, "normalized": True},
    }
    flags = {**fast, "eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "add_bos_token": True}
    gpt2 = byte_level(["<|endoftext|>", "<|im_start|>"])
    gpt2.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    neox = byte_level(["<|endoftext|>", "<|im_start|>"])
    neox.pre_tokenizer = pre_tokenizers.ByteLevel(True)
    neox.post_processor = processors.TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", 1)])
    ends = {"eos_token": "<|endoftext|>", "bos_token": "<|im_start|>"}
    made = {
        "gpt2": (gpt2, {**ends, "tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}),
        "neox": (neox, {**ends, "tokenizer_class": "GPTNeoXTokenizerFast"}),
        "split": (byte_level(["<|endoftext|>", "</s>"]), {**fast, "eos_token": "</s>", "split_special_tokens": True}),
        "llama3": (llama3, {**fast, "bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}),
        "llama2": (metaspace_bpe(), {**fast, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
        "unigram": (unigram(), {**fast, "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}),
        "flags": (flagged, {**flags, "added_tokens_decoder": added}),
    }
    return {
        name: {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": json.dumps(configuration)}
        for name, (tokenizer, configuration) in made.items()
    }


def hugging_face(arguments) -> dict:
    import tokenizers

    out = {}
    for name, files in styles().items():
        with tempfile.TemporaryDirectory() as directory:
            for file, text in files.items():
                (Path(directory) / file).write_text(text, encoding="utf-8")
            five = ask(arguments.transformers5, TRANSFORMERS, directory, "auto")
            four = ask(arguments.transformers4, TRANSFORMERS, directory, "auto")
        for text, a, b in zip(DIFFICULT, five["prompts"], four["prompts"], strict=True):
            if a != b:
                print(f"{name}: {five['by']} and {four['by']} differ on {text[:40]!r}: {a[:8]}, {b[:8]}")
        out[name] = {
            "files": files,
            "prompts": [a if a == b else None for a, b in zip(five["prompts"], four["prompts"], strict=True)],
            "by": f"{five['by']}, tokenizers {tokenizers.__version__}",
        }
    return out


def sentencepiece_models() -> dict[str, bytes]:
    import sentencepiece

    made = {}
    common = {"byte_fallback": True, "normalization_rule_name": "identity", "minloglevel": 3, "num_threads": 1}
    for name, options in {
        "llama": {"model_type": "bpe", "vocab_size": 480, "remove_extra_whitespaces": False},
        "unigram": {"model_type": "unigram", "vocab_size": 460, "hard_vocab_limit": False},
    }.items():
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TRAINING), model_writer=model, **common, **options
        )
        made[name] = model.getvalue()
    return made


def sentencepiece_golden(arguments) -> dict:
    import sentencepiece

    out = {}
    for name, model in sentencepiece_models().items():
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        slow, size = {}, processor.vocab_size()
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        added = {
            str(size): {**plain, "content": "<|im_end|>", "special": True, "rstrip": True, "lstrip": True},
            str(size + 1): {**plain, "content": "and", "special": False, "single_word": True},
        }
        configurations = {
            "silent": {},
            "new": {"legacy": False},
            "split": {"split_special_tokens": True},
            "new_split": {"legacy": False, "split_special_tokens": True},
            "added": {"add_bos_token": False, "add_eos_token": True, "added_tokens_decoder": added},
        }
        for label, configuration in configurations.items():
            if name == "unigram" and label != "silent":
                continue
            configuration["tokenizer_class"] = "LlamaTokenizer"
            with tempfile.TemporaryDirectory() as directory:
                (Path(directory) / "tokenizer.model").write_bytes(model)
                (Path(directory) / "tokenizer_config.json").write_text(json.dumps(configuration))
                asked = ask(arguments.transformers4, TRANSFORMERS, directory, "slow")
            slow[label] = {"configuration": configuration, **asked}
        out[name] = {
            "model": base64.b64encode(model).decode(),
            "documents": processor.encode(list(DIFFICULT)),
            "slow": slow,
            "by": f"sentencepiece {sentencepiece.__version__}",
        }
    return out


def write_gguf(path: Path, fields: dict) -> None:
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    for name, value in fields.items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def gguf_golden(arguments) -> dict:
    from sentencepiece import sentencepiece_model_pb2

    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trained = json.loads(byte_level(control).to_str())["model"]
    tokens = [*trained["vocab"], "<s>", "snake_case", "</s>"]
    byte_pairs = {
        "model": "gpt2",
        "tokens": tokens,
        # "snake_case" is the user's own; "</s>" is unused, and yet an end to llama.cpp
        "token_type": [
            3 if t in (*control, "<s>") else 4 if t == "snake_case" else 5 if t == "</s>" else 1 for t in tokens
        ],
        "merges": [" ".join(pair) for pair in trained["merges"]],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    proto = sentencepiece_model_pb2.ModelProto.FromString(sentencepiece_models()["llama"])
    pieces = {
        "model": "llama",
        "tokens": [p.piece for p in proto.pieces] + ["<|im_end|>"],
        "scores": [float(p.score) for p in proto.pieces] + [-1000.0],
        "token_type": [p.type for p in proto.pieces] + [3],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    out: dict = {"byte_pairs": byte_pairs, "pieces": pieces, "pre": {}, "spm": {}}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tiny.gguf"

        def asked(fields: dict) -> dict:
            write_gguf(path, {f"tokenizer.ggml.{k}": v for k, v in fields.items()})
            return ask(arguments.llama_cpp, LLAMA_CPP, str(path))

        for pre in PRE_TOKENIZERS:
            ids = asked({**byte_pairs, "pre": pre})
            out["pre"][pre] = {k: [digest(i) for i in ids[k]] for k in ("prompts", "documents")}
        for prefix in (True, False):
            ids = asked({**pieces, "add_space_prefix": prefix, "add_bos_token": prefix, "add_eos_token": not prefix})
            out["spm"][str(prefix).lower()] = {k: ids[k] for k in ("prompts", "documents")}
    out["smollm2"] = ask(arguments.llama_cpp, LLAMA_CPP, str(smollm2_gguf()))
    out["by"] = out["smollm2"].pop("by")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("transformers5", "transformers4", "llama-cpp"):
        parser.add_argument(f"--{name}", required=name != "llama-cpp", help="a Python that has it")
    arguments = parser.parse_args()
    makers = {"hf": hugging_face, "sentencepiece": sentencepiece_golden, "gguf": gguf_golden}
    if not arguments.llama_cpp:
        del makers["gguf"]
    for name, make in makers.items():
        text = json.dumps({"texts": DIFFICULT, **make(arguments)}, ensure_ascii=False, separators=(",", ":"))
        path = HERE / f"tokenizer_{name}_golden.json"
        path.write_text(text + "\n", encoding="utf-8")
        print(f"{path.name}: {len(text.encode()) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
