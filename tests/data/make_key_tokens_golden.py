r"""Makes key_tokens_golden.json beside it: the key tokens that longppl 0.3.0 finds in three documents.

    pip download longppl==0.3.0 --no-deps && python -m zipfile -e longppl-*.whl longppl_wheel
    PYTHONPATH=longppl_wheel python tests/data/make_key_tokens_golden.py      # a Python with torch and transformers

The model that judges is `CopyModel`, which knows bytes that followed the same three bytes before: what it predicts
depends on how far back it reads. `losses` says the same in numpy, for the test.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np

HERE = Path(__file__).parent
FILES = ("make_many_shot_golden.py", "make_niah_golden.py", "make_scorer_golden.py")  # documents that repeat themselves
BYTES = 3000
SETTINGS = ((512, 128), (256, 64), (700, 256))  # tokens of the short context, and that share one


def document(name: str) -> bytes:
    return (HERE / name).read_bytes()[:BYTES]


def losses(tokens: np.ndarray) -> np.ndarray:
    """[T] nats of the tokens 1 .. T of T + 1: c earlier matches of three bytes give the latest c / (c + 20)."""
    found = np.full(len(tokens) - 1, np.log(256.0))
    seen: dict[bytes, list[int]] = {}
    for t in range(2, len(tokens) - 1):
        key = bytes(tokens[t - 2 : t + 1].astype(np.uint8))
        if before := seen.get(key):
            share = len(before) / (len(before) + 20)
            copied = share if tokens[before[-1] + 1] == tokens[t + 1] else 0.0
            found[t] = -np.log(copied + (1 - share) / 256)
        seen.setdefault(key, []).append(t)
    return found


def main() -> None:
    import torch
    from longppl.longppl import find_key_token

    class CopyModel:
        device = "cpu"

        def __call__(self, ids):
            (row,) = ids.numpy()
            logits = np.zeros((1, len(row), 256))
            for t, loss in enumerate(losses(row)):  # cross-entropy of the target is what `losses` says
                p = np.exp(-loss)
                logits[0, t] = np.log((1 - p) / 255)
                logits[0, t, row[t + 1]] = np.log(p)
            return SimpleNamespace(logits=torch.tensor(logits))

    def tokenizer(text, **options):
        ids = torch.tensor([list(text)])
        return {"input_ids": ids, "offset_mapping": torch.tensor([[[i, i + 1] for i in range(len(text))]])}

    found = []
    for name in FILES:
        for short, stride in SETTINGS:
            spans = find_key_token(document(name), CopyModel(), tokenizer, short, stride)
            positions = [i for start, end in spans.tolist() for i in range(start, end)]
            found.append({"document": name, "short": short, "stride": stride, "positions": positions})
            print(name, short, stride, len(positions))
    documents = {name: document(name).decode() for name in FILES}
    golden = {"longppl": "0.3.0", "documents": documents, "key_tokens": found}
    (HERE / "key_tokens_golden.json").write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
