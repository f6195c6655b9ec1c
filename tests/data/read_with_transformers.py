"""Reads a model as a user of transformers does, in a process of its own, and writes what it computes.

    PYTHON tests/data/read_with_transformers.py --model=DIR --tokens=tokens.npy --out=logits.npy

--model, --tokens and --out may be repeated, as often each: imports take longer than a tiny model.
tests/transformers_environments.py starts it, with the python of an environment that has transformers 4.56 or 5; it
imports nothing of this repository. No remote code is trusted, no network asked. A tensor of the model that the files
lack, one of theirs that it does not take, and one of another shape are errors, where transformers only warns.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

# Whatever else from_pretrained reports, by its own name in each release.
PROBLEMS = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs", "conversion_errors")


def load(directory: str, gguf_file: str | None, dtype: str) -> PreTrainedModel:
    model, report = AutoModelForCausalLM.from_pretrained(
        directory,
        gguf_file=gguf_file,
        dtype=getattr(torch, dtype),
        trust_remote_code=False,
        local_files_only=True,
        output_loading_info=True,
        attn_implementation="eager",  # the others of transformers 4 ignore soft caps
    )
    problems = {key: sorted(map(str, report[key])) for key in PROBLEMS if report.get(key)}
    if problems:
        raise SystemExit(f"{directory} does not fit {type(model).__name__}: {json.dumps(problems, indent=1)}")
    return model.eval()


def logits_of(model: PreTrainedModel, tokens: torch.Tensor, last: int | None) -> np.ndarray:
    # Only those asked for are computed: at 8192 positions all of them are gigabytes.
    kept = {} if last is None else {"logits_to_keep": last}
    return model(tokens, use_cache=False, **kept).logits.float().numpy()


def projections_of(model: PreTrainedModel, tokens: torch.Tensor) -> dict[str, np.ndarray]:
    """The outputs of every layer's q_proj, k_proj and v_proj, [L, B, T, heads * K]."""
    found: dict[str, list[np.ndarray]] = {"q_proj": [], "k_proj": [], "v_proj": []}
    for name, module in model.named_modules():
        kind = name.rpartition(".")[2]
        if kind in found:
            module.register_forward_hook(lambda _, __, out, kind=kind: found[kind].append(out.float().numpy()))
    model(tokens, use_cache=False, logits_to_keep=1)
    return {kind: np.stack(layers) for kind, layers in found.items()}


def continuation_of(model: PreTrainedModel, tokens: torch.Tensor, new_tokens: int) -> np.ndarray:
    # Settings that come with the model (sampling, where to stop) are set aside, and so are guesses about padding.
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
    generated = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new_tokens, do_sample=False
    )
    return generated[:, tokens.shape[1] :].numpy()


def ids_of(directory: str, gguf_file: str | None, text: str) -> dict:
    tokenizer = AutoTokenizer.from_pretrained(
        directory, gguf_file=gguf_file, trust_remote_code=False, local_files_only=True
    )
    plain = tokenizer(text, add_special_tokens=False)["input_ids"]
    return {
        "plain": plain,
        "with_special_tokens": tokenizer(text)["input_ids"],
        "decoded": tokenizer.decode(plain, clean_up_tokenization_spaces=False),
        "class": type(tokenizer).__name__,
    }


def answer_of(directory: str, text: str, new_tokens: int) -> list[int]:
    """The ids that `generate` adds to a text, with everything as the directory's files say."""
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    inputs = tokenizer(text, return_tensors="pt")
    return model.generate(**inputs, max_new_tokens=new_tokens)[0, inputs["input_ids"].shape[1] :].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", action="append", required=True, help="a directory")
    parser.add_argument("--gguf-file", help="the name of a GGUF file in it")
    parser.add_argument("--dtype", default="float32", help="of the weights and the computation")
    parser.add_argument("--tokens", action="append", default=[], help=".npy, [B, T] integers")
    parser.add_argument("--out", action="append", default=[], help=".npy for the logits [B, T, V] float32")
    parser.add_argument("--last", type=int, help="the logits of so many last positions instead of all")
    parser.add_argument("--generate", type=int, help="continue the tokens, or the text, greedily by so many")
    parser.add_argument("--projections-out", help=".npz for the outputs of q_proj, k_proj and v_proj")
    parser.add_argument("--generated-out", help=".npy for the continuation [B, N]")
    parser.add_argument("--text", help="a UTF-8 file to tokenize")
    parser.add_argument("--ids-out", help=".json for its ids")
    parser.add_argument("--go-on", action="store_true", help="after an error, whose message is written to OUT.txt")
    arguments = parser.parse_args()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}", flush=True)

    if arguments.text:
        text = Path(arguments.text).read_bytes().decode()
        ids = ids_of(arguments.model[0], arguments.gguf_file, text)
        if arguments.generate:
            ids["answer"] = answer_of(arguments.model[0], text, arguments.generate)
        Path(arguments.ids_out).write_text(json.dumps(ids))
        print(f"{ids['class']}: {len(ids['plain'])} ids")
    if not arguments.tokens:
        return
    outs = arguments.out or [None] * len(arguments.tokens)
    for directory, tokens_file, out in zip(arguments.model, arguments.tokens, outs, strict=True):
        tokens = torch.tensor(np.load(tokens_file), dtype=torch.int64)
        started = time.monotonic()
        try:
            model = load(directory, arguments.gguf_file, arguments.dtype)
        except Exception as error:
            if not arguments.go_on:
                raise
            Path(f"{out}.txt").write_text(f"{type(error).__name__}: {error}")
            continue
        parameters = sum(parameter.numel() for parameter in model.parameters())
        print(f"{directory}: {type(model).__name__}, {parameters:,} parameters, {time.monotonic() - started:.1f} s")
        started = time.monotonic()
        with torch.no_grad():
            if out:
                np.save(out, logits_of(model, tokens, arguments.last))
            if arguments.projections_out:
                np.savez(arguments.projections_out, **projections_of(model, tokens))
            if arguments.generate:
                np.save(arguments.generated_out, continuation_of(model, tokens, arguments.generate))
        print(f"{tuple(tokens.shape)} tokens: {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
