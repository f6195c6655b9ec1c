"""How a saved tokenizer says what it is."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

KIND_FILE = "kind.json"


def digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def write_kind(tokenizer: Any, directory: Path) -> None:
    """Writes kind, fingerprint and sizes of a tokenizer, by which `load_saved_tokenizer` knows it again."""
    about = {k: getattr(tokenizer, k) for k in ("kind", "fingerprint", "vocab_size", "eos_id")}
    (directory / KIND_FILE).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
