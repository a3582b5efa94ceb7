"""Exported models are to transformers and llama.cpp what they are here, and so are their tokens."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.models.decoder import Decoder
from kvlab.models.export import export_model
from kvlab.models.load import Model, load_model
from kvlab.models.named import SHIPPED_MODELS, named_path
from kvlab.models.presets import preset
from kvlab.models.random_params import random_params
from kvlab.models.tokenizers import load_tokenizer, train_sentencepiece

TOLERANCE = 2e-4  # max |logit difference|, float32
# llama.cpp reads GELU out of a float16 table; the rest is float32.
GGUF_TOLERANCES = {"gpt2": 2e-2}
ROOT = pathlib.Path(__file__).parents[2]
with np.load(ROOT / "tests" / "goldens" / "families.npz") as goldens:
    CASES = sorted(goldens.files)
FILES = [
    *("llama_gqa", "llama_mqa", "llama_tied", "llama_biases", "llama_linear", "llama_llama3"),
    *("llama_yarn", "qwen3", "gpt2"),
]
TEXTS = ROOT / "research" / "texts"

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]


def forward(model: Model, tokens: np.ndarray) -> np.ndarray:
    config = model.config
    apply = jax.jit(lambda p, t: Decoder(config).apply({"params": p}, t, method="forward"))
    return np.asarray(apply(model.params, jnp.asarray(tokens)))


def llama_cpp_logits(path: pathlib.Path, tokens: np.ndarray) -> np.ndarray:
    """llama.cpp's logits [length, V] of one text, without flash attention, all in float32."""
    llama_cpp = pytest.importorskip("llama_cpp")
    float32 = 0
    model = llama_cpp.Llama(
        str(path),
        n_ctx=64,
        logits_all=True,
        flash_attn=False,
        type_k=float32,
        type_v=float32,
        verbose=False,
    )
    model.eval(tokens.tolist())
    logits = np.array(model.scores[: len(tokens)])
    model.close()
    return logits


@pytest.mark.parametrize(
    "case",
    CASES,
)
def test_a_folder_is_to_transformers_what_it_was(
    case, tiny_folder, tiny_families, golden_script, tmp_path
):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    model = load_model(str(tiny_folder(case)))
    export_model(tmp_path / "x", model, "huggingface")
    tokens = tiny_families.tokens(case)
    theirs = golden_script("make_families").reference_logits(tmp_path / "x", tokens)
    assert np.abs(forward(model, tokens) - theirs).max() <= TOLERANCE


@pytest.mark.parametrize(
    "case",
    FILES,
)
def test_a_file_is_to_llama_cpp_what_it_was(case, tiny_folder, tiny_families, tmp_path):
    model = load_model(str(tiny_folder(case)))
    export_model(tmp_path / "x.gguf", model, "gguf")
    tokens = tiny_families.tokens(case)[0]
    theirs = llama_cpp_logits(tmp_path / "x.gguf", tokens)
    ours = forward(model, tokens[None])[0]
    assert np.abs(ours - theirs).max() <= GGUF_TOLERANCES.get(case, TOLERANCE)


@pytest.mark.parametrize("name", SHIPPED_MODELS)
def test_what_comes_with_kvlab_is_the_same_model_elsewhere(name, golden_script, tmp_path):
    """The shipped folder as it lies, and a float32 file of it, on Shakespeare's kind of text."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    model = load_model(name)
    text = "KING HENRY:\nWhat says the morrow? Speak, and be not slow."
    tokens = np.array([model.tokenizer.encode(text, add_bos=True)])
    ours = forward(model, tokens)
    theirs = golden_script("make_families").reference_logits(named_path(name), tokens)
    assert np.abs(ours - theirs).max() <= TOLERANCE
    export_model(tmp_path / "x.gguf", model, "gguf")
    assert np.abs(ours[0] - llama_cpp_logits(tmp_path / "x.gguf", tokens[0])).max() <= TOLERANCE


def test_a_vocabulary_that_kvlab_trained(tmp_path):
    transformers = pytest.importorskip("transformers")
    llama_cpp = pytest.importorskip("llama_cpp")
    texts = [path.read_text() for path in sorted(TEXTS.glob("*.txt"))]
    tokenizer = load_tokenizer(train_sentencepiece(texts, tmp_path / "tokenizer", 600))
    config = dataclasses.replace(preset("tiny-gqa"), vocab_size=600)
    model = Model("m", config, random_params(config, 0), tokenizer, None)
    export_model(tmp_path / "hf", model, "huggingface")
    export_model(tmp_path / "x.gguf", model, "gguf")
    folder = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    file = llama_cpp.Llama(str(tmp_path / "x.gguf"), vocab_only=True, verbose=False)
    for text in [*texts, "  two  spaces\n\n", "ışık 漢字 🙂", "a"]:
        ids = tokenizer.encode(text, add_bos=True)
        assert folder(text)["input_ids"] == ids
        assert file.tokenize(text.encode(), add_bos=True) == ids
        assert folder.decode(ids, skip_special_tokens=True) == text
