"""The interface of a tokenizer, the tokenizer of bytes, and the one that a run without strings has."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, SupportsIndex, runtime_checkable

import numpy as np
from jaxtyping import Int32

from pe_lab.data.tokenizers.companions import CONFIGURATION, AddedToken, Companions, split_at_tokens
from pe_lab.data.tokenizers.tokenizer_json import bytes_tokenizer_json
from pe_lab.errors import UnsupportedError

TOKENIZER_JSON = "tokenizer.json"
SENTENCEPIECE_MODEL = "tokenizer.model"
# Ends the fingerprint of a tokenizer whose files would put the end of a document into documents that spell it, so that
# tokens which were made by them are not taken for those of `encode`.
WITHOUT_END = "-text"
# On which two implementations of a tokenizer often differ: to test them, and to check an exported one.
DIFFICULT: tuple[str, ...] = (
    "",
    " ",
    "  ",
    "\n",
    "a",
    "Hello, world!",
    " Hello  world   and    more     spaces ",
    "trailing spaces   ",
    "trailing newlines\n\n\n",
    "\t\ttabs\tand\t spaces \t mixed\t",
    "windows\r\nline\r\n\r\nends\rand old ones",
    "\u00a0no-break\u00a0 \u202fnarrow\u2003em\u3000wide \u1680ogham\u2028line\u2029paragraph\x85next",
    'def f(x: int) -> str:\n    """Doc."""\n\treturn f"{x!r:>10}"  # naïve\n\n\nclass A(B):\n        pass\n',
    "#include <vector>\nint main() { std::vector<int> v{1,2,3}; return v[0]<<2 | ~v[1] ^ 0xFF; } // ok\n",
    "const f = async (a, b) => `${a}/${b ?? 'x'}`; // <div class=\"a\">&amp;&lt;</div>\n",
    "SELECT * FROM t WHERE a <> 'it''s' AND b >= 1e-9; -- ok\n",
    "\\begin{equation} \\sum_{i=0}^{\\infty} x_i^2 \\end{equation} $\\alpha$",
    "I'm you're we'll they'd he's can't I'VE IT'S DON'T O'Neill 'tis rock'n'roll",
    "3.14159 1,000,000 0x1F 1e10 12 123 1234 12345678901234567890 ٣٤٥ Ⅷ ½ ² ①",
    "1" * 100,
    "日本語のテキスト、漢字とひらがなとカタカナ。中文文本,没有空格!한국어 텍스트입니다.",
    "مرحبا بالعالم، كيف حالك؟ שלום עולם, מה שלומך? नमस्ते दुनिया क्षत्रिय สวัสดีชาวโลก ខ្មែរ தமிழ்",
    "Привет, мир! Ёлка. Ελληνικά κείμενο. Việt Nam, Đặng Thị Ngọc. ÅÄÖ ß ẞ ǅ ŉ ﬁ ﬃ",
    "e\u0301 a\u030a o\u0308\u0323 n\u0303 Z\u0351\u036b\u0343\u036a\u0302 \u1112\u1161\u11ab \u212b \u00c5",
    "😀 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇯🇵 ❤️ ☃ ✈︎ 🧑🏿‍🚀👨🏻‍❤️‍💋‍👨🏼",
    "\u200bzero\u200bwidth\u200c\u200d\u2060joiner\ufeff",
    "\ufeff",
    "a\ufeffb \ufeff c",
    "\x01\x02\x07\x08\x0b\x0c\x1b[31mred\x1b[0m\x7f\x80\x9f",
    "\ue000\uf8ff\U000f0000\U0010fffd",
    "\ufffd \ufffe \uffff",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟘𝟙𝟚 𐍈 𠜎 𒀀",
    "the ▁ sign ▁▁ and ▁word ▁ Ġ Ċ and <0x0A> <0xE2>",
    "x" * 300,
    "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft" * 2,
    "aaaa aaaaa aaaaaaa bbbbbbbbbbbbbb ======== -------- ........ !!!!!!!! ######### ________",
    "<s> </s> <unk> <pad> <s>a</s>b <s><s> </s></s>",
    "<|endoftext|> <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>",
    "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] ok <start_of_turn>model\n<end_of_turn>",
    "a<|endoftext|>b<|endoftext|> c <|endoftext|>\n<|endoftext|>  <|im_end|>x<|im_start|",
    "https://user:pw@example.org:8080/a/b.html?q=1&r=%20#frag mail@example.com C:\\dir\\file.txt",
    "Mixed日本語and English и русский と123and😀done.",
    "UPPER lower Title camelCase snake_case kebab-case SCREAMING_SNAKE PascalCase iOS eBay",
    "\n\n\n    \n  \t \n \n",
    "“quotes” ‘single’ «guillemets» „low“ — em – en … ‐ hyphen ′ prime",
)


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back. `eos_id` ends every document and is never returned by `encode`.

    `encode` is for documents to train on: the names of special tokens are plain text there, and nothing is added.
    `encode_prompt` is for prompts: special tokens are found in the text, and BOS is added where the original
    tokenizer adds it, unless add_special_tokens=False (after a chat template, which contains it).
    """

    kind: str  # "bytes" | "hf" | "sentencepiece" | "none"
    vocab_size: int  # the largest id, plus one
    eos_id: int
    bos_id: int | None  # the first token of a prompt, if there is one
    stop_ids: tuple[int, ...]  # generation ends at these: eos_id, and those of generation_config.json
    fingerprint: str  # equal fingerprints encode documents equally
    companions: Companions

    def encode(self, text: str) -> Int32[np.ndarray, " n"]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " _"]]: ...

    def encode_prompt(self, text: str, add_special_tokens: bool = True) -> Int32[np.ndarray, " n"]:
        return self.encode_with_offsets(text)[0]

    def encode_with_offsets(self, text: str) -> tuple[Int32[np.ndarray, " n"], Int32[np.ndarray, "n 2"]]:
        """`encode_prompt` without special tokens added, and the characters [start, stop) that each token stands for."""
        ...

    def decode(self, ids: Iterable[SupportsIndex], skip_special_tokens: bool = True) -> str: ...

    def chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any) -> str:
        """The messages as a prompt, by the tokenizer's chat template; see `Companions.marked_chat`."""
        return self.companions.marked_chat(messages, add_generation_prompt, **variables)[0]

    def files(self) -> dict[str, bytes]:
        """The files from which `load_saved_tokenizer` makes this tokenizer, by name."""
        return {}

    def exported_files(self) -> dict[str, bytes]:
        """The files from which `transformers.AutoTokenizer` makes an equal tokenizer, by name."""
        return {}


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes, 0 to 255, and the end of a document, 256, which a prompt spells <|endoftext|>."""

    kind = "bytes"
    vocab_size = 257
    eos_id = 256
    bos_id = None
    stop_ids = (256,)
    fingerprint = "bytes-257"
    companions = Companions("bytes")
    end = AddedToken("<|endoftext|>", 256)

    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " _"]]:
        return [np.frombuffer(encodable(text).encode("utf-8"), np.uint8).astype(np.int32) for text in texts]

    def encode_with_offsets(self, text: str) -> tuple[Int32[np.ndarray, " n"], Int32[np.ndarray, "n 2"]]:
        ids, offsets, position = [np.zeros(0, np.int32)], [np.zeros((0, 2), np.int32)], 0
        for part in split_at_tokens(text, {self.end.content: self.end}):
            if isinstance(part, AddedToken):
                ids.append(np.asarray([self.eos_id], np.int32))
                starts, length = np.zeros(1, np.int32), len(self.end.content)
                stops = starts + length
            else:
                ids.append(self.encode(part))
                sizes = [len(character.encode()) for character in encodable(part)]
                starts, length = np.repeat(np.arange(len(part), dtype=np.int32), sizes), len(part)
                stops = starts + 1
            offsets.append(np.stack([starts, stops], axis=1).astype(np.int32) + position)
            position += length
        return np.concatenate(ids), np.concatenate(offsets).astype(np.int32)

    def decode(self, ids: Iterable[SupportsIndex], skip_special_tokens: bool = True) -> str:
        end = b"" if skip_special_tokens else self.end.content.encode()
        known = (int(i) for i in ids if 0 <= int(i) <= 256)
        return b"".join(bytes([i]) if i < 256 else end for i in known).decode("utf-8", errors="replace")

    def exported_files(self) -> dict[str, bytes]:
        configuration = transformers_configuration({}, eos_token=self.end.content)
        return {TOKENIZER_JSON: bytes_tokenizer_json(self.end).encode(), CONFIGURATION: configuration}


class NoTokenizer(Tokenizer):
    """Stands for the tokenizer of a run whose data are ids of an unknown one. Its checkpoints come without one."""

    kind = "none"
    vocab_size = 0
    eos_id = 0  # fills windows that have no targets
    bos_id = None
    stop_ids = ()
    fingerprint = "none"
    companions = Companions("none")

    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " _"]]:
        raise UnsupportedError("data.tokenizer is 'none', which encodes no strings: pass token ids.")

    def encode_with_offsets(self, text: str) -> tuple[Int32[np.ndarray, " n"], Int32[np.ndarray, "n 2"]]:
        return self.encode_batch([text])  # which refuses it

    def decode(self, ids: Iterable[SupportsIndex], skip_special_tokens: bool = True) -> str:
        """The ids as numbers."""
        return " ".join(str(int(i)) for i in ids)


def transformers_configuration(configuration: Mapping[str, Any], **defaults: Any) -> bytes:
    """A tokenizer_config.json with which transformers 4 and 5 take every id from tokenizer.json.

    The other tokenizer classes rebuild parts of tokenizer.json, each version in its own way. Without
    `model_input_names` version 4 also returns token_type_ids, which `generate` refuses.
    """
    written = {
        **configuration,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
    }
    written.pop("auto_map", None)
    for name, value in {**defaults, "clean_up_tokenization_spaces": False}.items():
        written.setdefault(name, value)
    return (json.dumps(written, indent=2, ensure_ascii=False) + "\n").encode()


def encodable(text: str) -> str:
    """The text with '?' for lone surrogates, which JSON and file names can have and UTF-8 cannot."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()


def digest(content: bytes) -> str:
    """A hash of a tokenizer's file, for fingerprints."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()
