"""What is written comes back in bits, in every form, or is refused in one line."""

import contextlib
import dataclasses
import json
import pathlib
import resource
import shutil
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from kvlab.models.checkpoints.errors import CheckpointError
from kvlab.models.checkpoints.expressible import with_scale_offset
from kvlab.models.checkpoints.gguf import load_gguf
from kvlab.models.checkpoints.gguf_export import save_gguf
from kvlab.models.checkpoints.hf_export import save_huggingface
from kvlab.models.checkpoints.huggingface import load_huggingface
from kvlab.models.checkpoints.writing import written_whole
from kvlab.models.config import DecoderConfig, LayerNorm, RMSNorm
from kvlab.models.export import FORMATS, export_model
from kvlab.models.load import Model, load_model
from kvlab.models.presets import preset
from kvlab.models.random_params import random_params
from kvlab.ops.rope import DynamicNTK, Llama3Scaling, Rope, YarnScaling

ROOT = pathlib.Path(__file__).parents[2]
with np.load(ROOT / "tests" / "goldens" / "families.npz") as goldens:
    CASES = sorted(goldens.files)
NOT_IN_GGUF = {
    "llama_dynamic": ["dynamic NTK"],
    "llama_yarn_mscale": ["rope=", "truncate=False", "would be read as"],
    "mistral_window": ["mistral", "sliding window of 13"],
    "mistral_mha_tied": ["sliding window of 13"],
    "mistral_mqa": ["sliding window of 13"],
    "qwen2": ["84 wide", "embed_dim=66"],
    "qwen2_mha_sharded": ["70 wide", "embed_dim=65"],
    "qwen2_mqa_untied": ["embed_dim=65"],
    "qwen2_windows": ["sliding window of 13"],
    "qwen3_layer_types": ["sliding window of 13"],
    "gemma2": ["query_scale=0.229", "would be read as None"],
    "gemma2_mha_sharded": ["query_scale="],
    "gemma2_mqa": ["query_scale="],
    "gpt2_variant": ["activation=gelu would be read as gelu_tanh", "query_scale=1.0"],
}
GGUF = [case for case in CASES if case not in NOT_IN_GGUF]


@pytest.fixture
def tiny(tiny_folder):
    return lambda case: load_huggingface(tiny_folder(case))


def flatten_dict(params: dict) -> dict:
    return traverse_util.flatten_dict(params, sep="/")


def same(left: dict, right: dict) -> bool:
    return jax.tree.structure(left) == jax.tree.structure(right) and all(
        a.dtype == b.dtype and np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    )


@pytest.mark.parametrize("case", CASES)
def test_a_hugging_face_folder_comes_back_in_bits(case, tiny, tmp_path):
    config, params = tiny(case)
    save_huggingface(tmp_path / "out", config, params)
    came_config, came = load_huggingface(tmp_path / "out")
    assert came_config == config
    assert same(came, params)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("case", GGUF)
def test_a_gguf_file_comes_back_in_bits(case, tiny, tmp_path):
    config, params = tiny(case)
    save_gguf(tmp_path / "out.gguf", config, params)
    came_config, came = load_gguf(tmp_path / "out.gguf")
    assert dataclasses.replace(came_config, rope=config.rope) == config
    assert (came_config.rope == config.rope) == (case != "llama_yarn")  # whose factor is inferred
    assert same(came, params)
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]


@pytest.mark.parametrize("case", NOT_IN_GGUF)
def test_what_gguf_or_llama_cpp_cannot_hold(case, tiny, tmp_path, refused):
    refused(lambda: save_gguf(tmp_path / "out.gguf", *tiny(case)), "GGUF", *NOT_IN_GGUF[case])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", ["llama_gqa", "mistral_window", "qwen3", "gemma2", "gpt2_variant"])
def test_kvlabs_own_folder_comes_back_in_bits(case, tiny_folder, tiny, tmp_path):
    export_model(tmp_path / "out", load_model(str(tiny_folder(case))), "kvlab")
    came = load_model(str(tmp_path / "out"))
    config, params = tiny(case)
    assert came.config == config
    assert same(came.params, params)


def test_other_shapes_of_qwen2_mistral_and_llama3(tmp_path):
    """What the tiny cases lack: heads that fill the width, no window, one blended frequency."""
    llama3 = Rope(500_000.0, Llama3Scaling(32.0, 1.0, 4.0, 8192))
    for name, changes in {
        "tiny-gqa": {"family": "qwen2", "qkv_bias": True, "tie_embeddings": True},
        "tiny-mha": {"family": "mistral"},
        "tiny-mqa": {"rope": llama3, "max_length": 131_072, "head_dim": 64},
    }.items():
        config = dataclasses.replace(preset(name), **changes)
        params = random_params(config, 3)
        for save, load in ((save_gguf, load_gguf), (save_huggingface, load_huggingface)):
            path = tmp_path / f"{name}.{load.__name__}.gguf"
            save(path, config, params)
            came_config, came = load(path)
            assert dataclasses.replace(came_config, family=config.family) == config
            assert same(came, params)


def test_gemmas_norms_change_places_and_nothing_else(tiny, tmp_path):
    config, params = tiny("gemma2")
    config = dataclasses.replace(config, query_scale=None)
    save_gguf(tmp_path / "a.gguf", config, params)
    around_0, stored = load_gguf(tmp_path / "a.gguf")
    assert around_0 == dataclasses.replace(config, norm=RMSNorm(1e-5))
    scale = params["layers_1"]["mlp_post_norm"]["scale"]
    assert np.array_equal(stored["layers_1"]["mlp_post_norm"]["scale"], 1 + scale)
    assert same(stored["embed"], params["embed"])
    save_huggingface(tmp_path / "b", around_0, stored)
    around_1, back = load_huggingface(tmp_path / "b")
    assert dataclasses.replace(around_1, query_scale=None) == config
    assert same(with_scale_offset(around_1, flatten_dict(back), 0.0)[1], flatten_dict(stored))


def test_a_scale_that_float32_cannot_store_around_1_is_refused(refused):
    config = dataclasses.replace(preset("tiny-gqa"), family="gemma2")
    params = random_params(config, 0)
    params["final_norm"]["scale"] = params["final_norm"]["scale"].at[2].set(1e-9)
    flat = flatten_dict(params)
    refused(lambda: with_scale_offset(config, flat, 1.0), "final_norm/scale", "around 1")
    layered = dataclasses.replace(config, norm=LayerNorm())
    assert with_scale_offset(layered, flat, 1.0) == (layered, flat)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("form", FORMATS)
def test_a_narrower_type_is_rounded_once(form, dtype, tiny, tmp_path):
    config, params = tiny("llama_biases")
    path = tmp_path / "out.gguf"
    export_model(path, Model("m", config, params, None, None), form, dtype=dtype)
    came = load_model(str(path), param_dtype=dtype)
    assert came.config == dataclasses.replace(config, param_dtype=dtype)
    assert same(came.params, jax.tree.map(lambda leaf: leaf.astype(dtype), params))
    if form != "kvlab":
        wide = load_model(str(path)).params["layers_0"]["mlp"]["up"]
        rounded = params["layers_0"]["mlp"]["up"]["weight"].astype(dtype)
        assert np.array_equal(wide["weight"], rounded.astype(jnp.float32))


BASE = preset("tiny-gqa")


@pytest.mark.parametrize(
    ("form", "config", "words"),
    [
        ("huggingface", dataclasses.replace(BASE, num_kv_heads=(3, 1)), ["num_kv_heads=(3, 1)"]),
        ("huggingface", dataclasses.replace(BASE, qkv_bias=True), ["output_bias=False would be"]),
        ("huggingface", dataclasses.replace(BASE, windows=(7, None)), ["windows=(7, None)"]),
        ("huggingface", dataclasses.replace(BASE, family="mixtral"), ["family='mixtral'", "gpt2"]),
        ("huggingface", dataclasses.replace(BASE, norm=LayerNorm()), ["RMS norms and RoPE alone"]),
        ("huggingface", dataclasses.replace(BASE, soft_cap=3.0), ["soft_cap=3.0", "read as None"]),
        (
            "huggingface",
            dataclasses.replace(BASE, rope=Rope(1e4, DynamicNTK(2.0, 100))),
            ["max_length=1024 would be read as 200"],
        ),
        ("gguf", dataclasses.replace(BASE, num_kv_heads=(3, 1)), ["different KV heads (3, 1)"]),
        ("gguf", dataclasses.replace(BASE, family="mixtral"), ["family='mixtral'", "gpt2"]),
        ("gguf", dataclasses.replace(BASE, norm=LayerNorm()), ["lacks the key"]),
        ("gguf", dataclasses.replace(BASE, rope=Rope(1 + 1e-9)), ["theta"]),
        (
            "gguf",
            dataclasses.replace(BASE, rope=Rope(1e4, YarnScaling(4.0, 256, attention_factor=2.0))),
            ["attention_factor=2.0", "would be read as"],
        ),
    ],
)
def test_features_without_a_counterpart(form, config, words, tmp_path, refused):
    model = Model("m", config, random_params(config, 0), None, None)
    refused(lambda: export_model(tmp_path / "x.gguf", model, form), *words)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_form():
    with pytest.raises(ValueError, match="format 'onnx' is not known; legal values: kvlab, hugg"):
        export_model("x", load_model("random:tiny-mqa"), "onnx")


@pytest.mark.parametrize("form", FORMATS)
class TestWholeOrNotAtAll:
    def test_nothing_is_overwritten_unless_it_may_be(self, form, tmp_path, refused):
        path, model = tmp_path / "out.gguf", load_model("random:tiny-mqa")
        export_model(path, model, form)
        other = load_model("random:tiny-gqa")
        refused(lambda: export_model(path, other, form), "exists already", str(path))
        assert same(load_model(str(path)).params, model.params)
        export_model(path, other, form, overwrite=True)
        assert same(load_model(str(path)).params, other.params)
        assert [found.name for found in tmp_path.iterdir()] == ["out.gguf"]

    def test_what_is_no_model_is_never_overwritten(self, form, tmp_path, refused):
        model = load_model("random:tiny-mqa")
        folder, file = tmp_path / "papers", tmp_path / "notes.txt"
        folder.mkdir()
        (folder / "thesis.tex").write_text("years")
        file.write_text("years")
        for path in (folder, file):
            export = lambda path=path: export_model(path, model, form, overwrite=True)  # noqa: E731
            refused(export, "holds no model", str(path))
        assert (folder / "thesis.tex").read_text() == file.read_text() == "years"

    def test_one_form_replaces_another(self, form, tmp_path):
        path, model = tmp_path / "out.gguf", load_model("random:tiny-mqa")
        for before in FORMATS:
            export_model(path, model, before, overwrite=True)
            export_model(path, model, form, overwrite=True)
            assert same(load_model(str(path)).params, model.params)
        assert [found.name for found in tmp_path.iterdir()] == ["out.gguf"]

    def test_too_little_room_is_seen_before(self, form, tmp_path, refused, monkeypatch):
        usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        model = load_model("random:tiny-mqa")
        call = lambda: export_model(tmp_path / "x.gguf", model, form)  # noqa: E731
        refused(call, "cannot write", "MB are needed", "0.1 MB free")
        assert list(tmp_path.iterdir()) == []

    # Threads of Orbax's die with tracebacks of their own.
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    def test_a_full_disk_leaves_what_was_there(self, form, tmp_path):
        # A limit on the size of files makes the kernel refuse a write, as a full disk does.
        path, model = tmp_path / "out.gguf", load_model("random:tiny-mqa")
        other = load_model("random:tiny-gqa")
        export_model(path, model, form)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            with pytest.raises(ValueError, match="File too large"):
                export_model(path, other, form, overwrite=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert same(load_model(str(path)).params, model.params)
        assert [found.name for found in tmp_path.iterdir()] == ["out.gguf"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    config = dataclasses.replace(preset("tiny-mqa"), num_layers=1, num_kv_heads=1, windows=None)
    save_huggingface(tmp_path / "link", config, random_params(config, 0), overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "config.json").is_file()


def test_config_json_says_what_transformers_reads(tiny, tmp_path):
    config, params = tiny("llama_llama3")
    save_huggingface(tmp_path / "x", config, params, dtype="bfloat16", tokens={"eos_token_id": [2]})
    said = json.loads((tmp_path / "x" / "config.json").read_text())
    assert said["architectures"] == ["LlamaForCausalLM"]
    assert (said["torch_dtype"], said["eos_token_id"]) == ("bfloat16", [2])
    assert said["rope_scaling"]["rope_type"] == "llama3"
    assert isinstance(config, DecoderConfig)


def test_a_writer_whose_threads_go_on_does_not_hide_why_it_failed(tmp_path):
    late: list[threading.Thread] = []

    def go_on(folder):
        for number in range(60):
            with contextlib.suppress(FileNotFoundError):
                (folder / f"late-{number}").touch()
            time.sleep(0.005)

    def write():
        with written_whole(tmp_path / "model", 0) as folder:
            folder.mkdir()
            late.append(threading.Thread(target=go_on, args=(folder,)))
            late[0].start()
            time.sleep(0.02)
            raise CheckpointError(f"cannot write {folder}: the disk said no")

    with pytest.raises(CheckpointError, match=r"cannot write .*: the disk said no"):
        write()
    late[0].join()
    assert list(tmp_path.iterdir()) == []
