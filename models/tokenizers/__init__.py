"""Tokenizers behind one contract: load one, encode, decode, stream, and lay out a conversation."""

from kvlab.models.tokenizers.base import SpecialTokens, Tokenizer
from kvlab.models.tokenizers.byte_tokenizer import ByteTokenizer
from kvlab.models.tokenizers.chat import encode_chat, render_chat
from kvlab.models.tokenizers.loading import load_tokenizer
from kvlab.models.tokenizers.stream import Detokenizer, StopStrings
from kvlab.models.tokenizers.training import train_sentencepiece

__all__ = [
    "ByteTokenizer",
    "Detokenizer",
    "SpecialTokens",
    "StopStrings",
    "Tokenizer",
    "encode_chat",
    "load_tokenizer",
    "render_chat",
    "train_sentencepiece",
]
