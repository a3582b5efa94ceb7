"""Text out of tokens as they come: whole characters only, and stop strings across tokens."""

import codecs
from collections.abc import Iterable, Sequence

from kvlab.models.tokenizers.base import Tokenizer


class Detokenizer:
    """Decodes a stream of tokens, holding back bytes until they are whole characters.

    What `push` and `finish` return, joined, is what `Tokenizer.decode` gives for all the ids.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, continued: bool = True, keep_special: bool = False
    ) -> None:
        """Starts a stream.

        Args:
          tokenizer: Whose ids they are.
          continued: The stream continues a text (a prompt), so a space at its start counts.
          keep_special: Write special tokens out instead of dropping them.
        """
        self._tokenizer = tokenizer
        self._started = continued
        self._keep_special = keep_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next ids; returns the characters that they complete."""
        options = {"keep_special": self._keep_special}
        if self._started:
            raw = self._tokenizer.decode_bytes(ids, continued=True, **options)
        else:
            raw, self._started = self._tokenizer.decode_start(ids, **options)
        return self._decoder.decode(raw)

    def finish(self) -> str:
        """Ends the stream; returns U+FFFD for a character that was left unfinished."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Cuts a stream of text at the first stop string, wherever tokens split it."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Starts a stream.

        Args:
          stops: The strings that end it; they are not part of the output.

        Raises:
          ValueError: An empty stop string, which would end every text at once.
        """
        if not all(stops):
            raise ValueError("a stop string is empty; give at least one character")
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Takes the next text; returns what can no longer belong to a stop string.

        After a stop string was seen `stopped` is True and every call returns "".
        """
        if self.stopped:
            return ""
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            return self._release(min(found))
        return self._release(len(self._held) - self._possible_start())

    def finish(self) -> str:
        """Ends the stream; returns the text that was held back, "" after a stop string."""
        return "" if self.stopped else self._release(len(self._held))

    def _possible_start(self) -> int:
        """Length of the longest end of the held text that some stop string starts with."""
        longest = min(max(map(len, self._stops), default=1) - 1, len(self._held))
        for length in range(longest, 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0

    def _release(self, length: int) -> str:
        released, self._held = self._held[:length], self._held[length:]
        return released
