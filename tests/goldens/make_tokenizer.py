"""Makes tokenizer_smollm2.json and tokenizer_spm.json: token ids of llama.cpp on fixed texts.

Run where llama-cpp-python is installed:

    python tests/goldens/make_tokenizer.py SMOLLM2.gguf MISTRAL_tokenizer.model.v1

The second file is a SentencePiece model; it is put into a GGUF file without tensors first, which
is also how the tests use it.
"""

import json
import pathlib
import sys
import tempfile

import gguf
import sentencepiece

TEXTS = {
    "english": "The cache holds one key and one value for every token, layer and head.",
    "turkish": "Işığın hızı değişmez; İzmir'deki çığlık, ılık bir güz öğleninde duyuldu.",
    "turkish capitals": "DİYARBAKIR IĞDIR ŞIRNAK ÇANKIRI düğüm bağı",
    "digits": "In 2024 we stored 1234567890 tokens, 3.14159 GiB, 1,000,000 pages, ½ of 10².",
    "other digits": "٣٤٥ १२३ １２３ Ⅷ",
    "spaces": "one  two   three    four     five",
    "leading and trailing": "   in the middle   ",
    "only spaces": "       ",
    "newlines": "first\nsecond\n\nthird\r\nfourth\r\n\r\n",
    "mixed whitespace": "\t tab \t\t two \n \n  \u00a0no-break\u2003em\u3000wide \u2028 line",
    "emoji": "👍🏽 fine 🙂🙂 👩‍👩‍👧‍👦 🇹🇷🇬🇧 ❤️",
    "mixed scripts": "latin кириллица ελληνικά 漢字かな한글 العربية עברית ไทย देवनागरी",
    "code": "def f(x, *, y=0x1F):\n    if x != y:  # compare\n\treturn x**2 // (y - 1)\n",
    "identifiers": "camelCase snake_case __dunder__ HTTPServer2 v1.2.3-rc1",
    "contractions": "I'm sure they'll say we've done what she'd do, it's 'tis, DON'T, WE'LL",
    "apostrophes": "Ankara'ya 1923'te 5'lik rock 'n' roll ‘quoted’ don’t '' '",
    "punctuation": 'Wait... what?! (yes) [no] {maybe} <a href="x">$5+5=10^1~|`</a> — – … ·',
    "combining marks": "cafe\u0301 i\u0307 I\u0307 a\u0308\u0304 \u0301",
    "controls": "nul\x00bel\x07esc\x1b del\x7f nel\x85 bom\ufeff zwsp\u200b repl\ufffd",
    "special tokens": "<|im_start|>user\nhi<|im_end|>\n<s>[INST] hi [/INST]</s><unk><|endoftext|>",
    "byte names": "<0x0A> <0xFF>",
    "empty": "",
}


def write_spm_gguf(model: pathlib.Path, out: pathlib.Path) -> None:
    """Writes a GGUF file that holds the tokenizer of a SentencePiece BPE model and nothing else."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    ids = list(range(processor.get_piece_size()))
    kinds = {
        gguf.TokenType.BYTE: processor.is_byte(ids),
        gguf.TokenType.CONTROL: processor.is_control(ids),
        gguf.TokenType.UNKNOWN: processor.is_unknown(ids),
        gguf.TokenType.UNUSED: processor.is_unused(ids),
    }
    types = [
        next((kind for kind, flags in kinds.items() if flags[i]), gguf.TokenType.NORMAL)
        for i in ids
    ]
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([processor.id_to_piece(i) for i in ids])
    writer.add_token_scores([processor.get_score(i) for i in ids])
    writer.add_token_types(types)
    writer.add_bos_token_id(processor.bos_id())
    writer.add_eos_token_id(processor.eos_id())
    writer.add_unk_token_id(processor.unk_id())
    # llama.cpp asks for these even when it loads the vocabulary alone.
    writer.add_context_length(11)
    writer.add_embedding_length(4)
    writer.add_feed_forward_length(4)
    writer.add_head_count(1)
    writer.add_block_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_cpp_ids(path: pathlib.Path) -> dict[str, dict[str, list[int]]]:
    """Tokenises every text twice: specials as text, and as tokens."""
    import llama_cpp

    model = llama_cpp.Llama(model_path=str(path), vocab_only=True, n_ctx=11, verbose=False)
    return {
        name: {
            "plain": model.tokenize(text.encode(), add_bos=False, special=False),
            "special": model.tokenize(text.encode(), add_bos=False, special=True),
        }
        for name, text in TEXTS.items()
    }


def main() -> None:
    """Writes both goldens beside this file."""
    smollm2, model = (pathlib.Path(argument) for argument in sys.argv[1:3])
    here = pathlib.Path(__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        spm = pathlib.Path(folder) / "spm.gguf"
        write_spm_gguf(model, spm)
        for name, path in {"smollm2": smollm2, "spm": spm}.items():
            ids = llama_cpp_ids(path)
            # One case a line keeps the file readable in a diff.
            lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in ids.items()]
            content = "{\n" + ",\n".join(lines) + "\n}\n"
            (here / f"tokenizer_{name}.json").write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
