"""A small model as the harness sees it, and a tokenizer that begins texts with <s>."""

import dataclasses
import json
from typing import Any

import tiny

from pe_lab.data.tokenizers import ByteTokenizer
from pe_lab.data.tokenizers.companions import Companions
from pe_lab.data.tokenizers.hugging_face import HuggingFaceTokenizer
from pe_lab.evaluation.lm_eval import PeLabLM
from pe_lab.language_model import LanguageModel

MAX_LENGTH = 32


def language_model(tokenizer: Any = None, uniform: bool = False) -> LanguageModel:
    found = tiny.checkpoint()
    if uniform:
        params = {
            **found.params,
            "token_embedder": {
                **found.params["token_embedder"],
                "embedding": 0 * found.params["token_embedder"]["embedding"],
            },
        }
        found = dataclasses.replace(found, params=params)
    return dataclasses.replace(tiny.language_model(found), tokenizer=tokenizer or ByteTokenizer())


LM = language_model()


def adapter(lm: LanguageModel = LM, **settings: Any) -> Any:
    return PeLabLM(lm, **{"max_length": MAX_LENGTH, "devices": tiny.one_device(), **settings})


def with_beginning(template: str | None = None) -> HuggingFaceTokenizer:
    """Characters, with <s> before every prompt, and the space that a text begins with left out when it is decoded."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    pieces = ["<s>", "</s>", "▁", *"abcdefghijklmnopqrstuvwxyz[]<>/|"]
    tokenizer = Tokenizer(models.BPE({piece: n for n, piece in enumerate(pieces)}, []))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    configuration = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    files = {"tokenizer_config.json": json.dumps(configuration).encode()}
    return HuggingFaceTokenizer(tokenizer.to_str(), Companions("a test", files))
