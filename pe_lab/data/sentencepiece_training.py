"""SentencePiece models trained on one's own text."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator

from pe_lab.data.companions import Companions
from pe_lab.data.sentencepiece_tokenizer import SentencePieceTokenizer
from pe_lab.errors import UserError


def training_size(specification: str) -> int | None:
    """SIZE of `sentencepiece:train:SIZE`, None for every other specification.

    Raises:
      UserError: SIZE is not a whole number of at least 300 (256 bytes, the specials, and something to learn).
    """
    if not specification.startswith("sentencepiece:train:"):
        return None
    size = specification.removeprefix("sentencepiece:train:")
    if not re.fullmatch(r"[0-9]+", size) or int(size) < 300:
        raise UserError(
            f"data.tokenizer={specification!r}: SIZE must be a whole number of at least 300, as in "
            "sentencepiece:train:4096."
        )
    return int(size)


def train_sentencepiece(documents: Iterable[str], size: int, where: str) -> SentencePieceTokenizer:
    """Trains a byte-pair SentencePiece model of `size` pieces on a spread sample of `documents`.

    Nothing is normalized: whitespace is kept, unseen characters and line ends fall back to bytes, so that
    decoding gives the text back. The same documents give the same model. `where` names the text in messages.

    Raises:
      UserError: there is no text, or too little of it for `size` pieces.
    """
    import sentencepiece

    sample = _sample_lines(documents, characters=max(2_000_000, 500 * size))
    if not sample:
        raise UserError(f"data source {where!r} is empty: there is no text to train a tokenizer on.")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sample),
            model_writer=model,
            model_type="bpe",
            vocab_size=size,
            hard_vocab_limit=True,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            character_coverage=0.9995,
            max_sentence_length=1_000_000,
            shuffle_input_sentence=False,
            num_threads=1,  # the result may depend on the number of threads
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            minloglevel=3,
        )
    except (RuntimeError, OSError) as error:
        most = re.search(r"value <= (\d+)", str(error))
        if most:
            raise UserError(
                f"data source {where!r} has too little text for a SentencePiece tokenizer of {size} pieces: "
                f"it gives at most {most[1]}. Ask for fewer, or use more text."
            ) from error
        reason = str(error).strip().splitlines()[-1]
        raise UserError(f"Cannot train a SentencePiece tokenizer on {where!r}: {reason}") from error
    return SentencePieceTokenizer(model.getvalue(), Companions(f"trained with {size} pieces"))


def _sample_lines(documents: Iterable[str], characters: int) -> list[str]:
    """About `characters` characters of lines, spread evenly over the first 16 times as many characters."""
    lines, total = [], 0
    for line in _lines(documents):
        lines.append(line)
        total += len(line)
        if total >= 16 * characters:
            break
    step = max(1, total // characters)
    return lines[::step]


def _lines(documents: Iterable[str]) -> Iterator[str]:
    for document in documents:
        for line in document.split("\n"):
            if line:
                yield line.replace("\0", " ")  # SentencePiece refuses NUL
