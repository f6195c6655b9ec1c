"""Tokenizers with one interface: bytes, Hugging Face `tokenizer.json`, SentencePiece and GGUF."""

from pe_lab.data.tokenizers.hugging_face import HuggingFaceTokenizer
from pe_lab.data.tokenizers.loading import (
    KIND_FILE,
    check_vocabulary,
    export_tokenizer,
    load_saved_tokenizer,
    load_tokenizer,
    same_ids,
    save_tokenizer,
)
from pe_lab.data.tokenizers.sentencepiece import SentencePieceTokenizer, train_sentencepiece, training_size
from pe_lab.data.tokenizers.tokenizer import ByteTokenizer, Tokenizer, encodable
