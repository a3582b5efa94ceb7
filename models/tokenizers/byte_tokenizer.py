"""The tokenizer of models without one (random weights): an id is a byte."""

import re

from kvlab.models.tokenizers.base import REPLACEMENT, SpecialTokens, Tokenizer

BOS_ID = 256
EOS_ID = 257
MIN_VOCAB_SIZE = 258


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are bytes, 256 begins and 257 ends a text; the rest of a vocabulary is unused.

    Unused ids decode to U+FFFD, so that the output of a model with random weights and any
    vocabulary size can be read.
    """

    def __init__(self, vocab_size: int = MIN_VOCAB_SIZE) -> None:
        """Makes one for a model.

        Args:
          vocab_size: The model's vocabulary size.

        Raises:
          ValueError: Fewer than 258 ids.
        """
        if vocab_size < MIN_VOCAB_SIZE:
            raise ValueError(
                f"vocab_size {vocab_size} is too small for the byte tokenizer: it needs "
                f"{MIN_VOCAB_SIZE} (256 bytes, begin and end of text)"
            )
        super().__init__("bytes", SpecialTokens(bos_id=BOS_ID, eos_ids=(EOS_ID,)))
        self._vocab_size = vocab_size
        self._special = {"<bos>": BOS_ID, "<eos>": EOS_ID}

    @property
    def vocab_size(self) -> int:
        """The model's vocabulary size."""
        return self._vocab_size

    def id_to_piece(self, token_id: int) -> str:
        """Returns a printable ASCII character as itself, any other byte as `<0x0A>`."""
        self._check_id(token_id)
        if token_id < BOS_ID:
            return chr(token_id) if 0x20 < token_id < 0x7F else f"<0x{token_id:02X}>"
        names = {special_id: name for name, special_id in self._special.items()}
        return names.get(token_id, f"<unused_{token_id}>")

    def piece_to_id(self, piece: str) -> int | None:
        """Returns the id of a special token or of a byte, as `id_to_piece` spells it."""
        if piece in self._special:
            return self._special[piece]
        return next((i for i in range(BOS_ID) if self.id_to_piece(i) == piece), None)

    def is_special(self, token_id: int) -> bool:
        """Whether the token begins or ends a text."""
        return token_id in (BOS_ID, EOS_ID)

    def piece_bytes(self, token_id: int) -> bytes:
        """Returns the byte."""
        return bytes([token_id]) if token_id < BOS_ID else REPLACEMENT

    def encode_text(self, text: str, parse_special: bool) -> list[int]:
        """Returns the UTF-8 bytes of the text."""
        if not parse_special:
            return list(text.encode())
        ids: list[int] = []
        for part in re.split("(<bos>|<eos>)", text):
            ids += [self._special[part]] if part in self._special else list(part.encode())
        return ids
