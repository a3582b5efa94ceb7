"""Show how tokenizers cut texts: tokens a word, bytes a token, pieces and vectors.

    kvlab tokenizers
    kvlab tokenizers --tokenizer=bytes --tokenizer=FOLDER --text_file=news.en --text_file=news.tr
    kvlab tokenizers --text="LLM mimarisi hızlıdır" --model=smollm2-135m

Without --text, the words and tokens of texts are counted, each line encoded alone: the project's
own English and Turkish texts, or those of --text_file. With --text, the pieces of that text are
shown with their ids, and with --model what the vector of each lies near. A word is what stands
between spaces.
"""

import sys
from typing import TYPE_CHECKING

from kvlab.experiments.flags import DEFAULT_MODEL, Flag, command_flags, text, whole
from kvlab.experiments.main import execute

if TYPE_CHECKING:
    import numpy as np

    from kvlab.models.tokenizers import Tokenizer

FLAGS = command_flags(
    tokenizer=Flag(
        text,
        "NAME",
        "a fetched model, a folder, a file (.gguf, tokenizer.json, encoder.json, SentencePiece) or "
        f"bytes; {DEFAULT_MODEL} if it is fetched, or else bytes, if not given",
        (),
        repeatable=True,
    ),
    text_file=Flag(text, "FILE", "a text to count", (), repeatable=True),
    text=Flag(text, "TEXT", "show the pieces of this text"),
    model=Flag(
        text, "MODEL", "with --text: take the tokenizer and the token vectors of this model"
    ),
    neighbours=Flag(whole(1), "N", "with --model: nearest tokens to show for each", 5),
)


def main(argv: list[str]) -> None:
    """Prints the tables that the flags ask for."""
    del argv
    from kvlab.research.prompts import check_unicode
    from kvlab.research.token_tables import (
        count_table,
        piece_table,
        project_texts,
        read_texts,
    )

    if FLAGS.model and FLAGS.text is None:
        raise ValueError("--model shows the vectors of a text; give one with --text")
    tokenizers, embedding = _model() if FLAGS.model else (_tokenizers(), None)
    if FLAGS.text is not None:
        check_unicode(FLAGS.text, "--text")
        blocks = [
            piece_table(name, tokenizer, FLAGS.text, embedding, FLAGS.neighbours, _width(name))
            for name, tokenizer in tokenizers.items()
        ]
        print("\n\n".join(blocks))
    if FLAGS.text is None or FLAGS.text_file:
        texts = read_texts(FLAGS.text_file) if FLAGS.text_file else project_texts()
        print(count_table(tokenizers, texts))


def _width(name: str) -> int | None:
    """Width of the vectors of the published model that a tokenizer is named after, if it is."""
    from kvlab.models.presets import PRESETS

    return PRESETS[name].embed_dim if name in PRESETS else None


def _tokenizers() -> "dict[str, Tokenizer]":
    """The tokenizers of the flags by name, or the default one."""
    from kvlab.models.package_index import FetchError
    from kvlab.research.token_tables import BYTES, named_tokenizers

    if FLAGS.tokenizer:
        return named_tokenizers(FLAGS.tokenizer)
    try:
        return named_tokenizers([DEFAULT_MODEL])
    except FetchError as error:
        print(f"byte tokenizer, because {error}", file=sys.stderr)
        return named_tokenizers([BYTES])


def _model() -> "tuple[dict[str, Tokenizer], np.ndarray]":
    """The tokenizer of --model by its name, and the model's token vectors [V, D]."""
    import numpy as np

    from kvlab.models.load import load_model

    if FLAGS.tokenizer:
        raise ValueError("--model brings its own tokenizer; leave --tokenizer out")
    model = load_model(FLAGS.model)
    if model.tokenizer is None:
        raise ValueError(f"model {FLAGS.model} has no tokenizer to cut a text with")
    embedding = np.asarray(model.params["embed"]["weight"])
    return {model.name: model.tokenizer}, embedding


if __name__ == "__main__":
    sys.exit(execute(sys.modules[__name__]))
