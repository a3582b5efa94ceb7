"""Writes kvpress.npz: the tokens that kvpress 0.5.5 keeps on tiny random models.

kvpress 0.5.5 takes transformers below 5.3 only, so it needs an environment of its own:

    python3 -m venv VENV && VENV/bin/pip install torch 'transformers<5.3' kvpress==0.5.5
    VENV/bin/python tests/goldens/make_kvpress.py

A press acts after each layer's prefill, so every layer sees hidden states of the full cache.
StreamingLLMPress and SnapKVPress shorten a layer's keys; the tokens they keep are found by matching
those keys with the full cache's. AdaKVPress keeps the keys and names those that decode must mask.

Axes: L layers, N query heads, K KV heads, H head size, T tokens, O = OBSERVATIONS, C cases. Arrays:
  policies [C]: one JSON text a case: `policy` (sinks, snapkv or per_head), kvpress's compression
    `ratio`, and the policy's own parameters.
  prompts: one JSON text a prompt: its `name`, `model` (in tiny_families.RETENTION_CASES), `length`.
  For each prompt, by its name:
  tokens_NAME [T] int32, budgets_NAME [C] int32 (tokens a head keeps, on average over the heads
    of a layer in per_head), kept_NAME [C, L, K, T] bool.
  For each prompt of DETAILED, float32:
  query_NAME [L, T, N, H], key_NAME [L, T, K, H], rotated; snapkv_NAME [O, L, K, T], SnapKVPress's
    scores, the window's own being max + 1; observed_NAME [L, K, T], ObservedAttentionPress's.

Prompts are drawn until no score at a cut is within MARGIN of the next, so that sums taken in
another order keep the same tokens.
"""

import json
import pathlib
import tempfile
import zlib
from unittest import mock

import kvpress
import numpy as np
import tiny_families
import torch
import transformers
from transformers.models.llama import modeling_llama

TARGET = pathlib.Path(__file__).with_name("kvpress.npz")
LENGTHS = (61, 97, 149)
RATIOS = (0.3, 0.5, 0.7)
OBSERVATIONS = (3, 13)
SAFEGUARDS = (0.2, 0.7)
NUM_SINKS = 4
POOLING = 5
DETAILED = ("retention_gqa_61", "retention_gqa_97")
MARGIN = 1e-4  # relative

POLICIES = (
    *({"policy": "sinks", "ratio": ratio, "num_sinks": NUM_SINKS} for ratio in RATIOS),
    *(
        {"policy": "snapkv", "ratio": ratio, "observation": observation}
        for observation in OBSERVATIONS
        for ratio in RATIOS
    ),
    *(
        {"policy": "per_head", "ratio": ratio, "observation": observation, "safeguard": safeguard}
        for observation in OBSERVATIONS
        for ratio in RATIOS
        for safeguard in SAFEGUARDS
    ),
)


def make_press(policy: dict) -> kvpress.BasePress:
    """The press that a case of POLICIES describes."""
    if policy["policy"] == "sinks":
        return kvpress.StreamingLLMPress(policy["ratio"], n_sink=policy["num_sinks"])
    snapkv = kvpress.SnapKVPress(
        policy["ratio"], window_size=policy["observation"], kernel_size=POOLING
    )
    if policy["policy"] == "snapkv":
        return snapkv
    return kvpress.AdaKVPress(snapkv, alpha_safeguard=policy["safeguard"])


def load_model(case: str, attention: str) -> transformers.PreTrainedModel:
    """A tiny model in float32; AdaKVPress needs `sdpa`, ObservedAttentionPress `eager`."""
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_families.write_tiny_folder(case, pathlib.Path(folder))
        return transformers.AutoModelForCausalLM.from_pretrained(
            path, attn_implementation=attention, dtype=torch.float32
        ).eval()


def prefill(model, tokens: np.ndarray, press: kvpress.BasePress | None = None) -> list[np.ndarray]:
    """Each layer's keys [K, at most T, H] after the prompt, pruned by a press if one is given."""
    cache = transformers.DynamicCache()
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    with torch.no_grad():
        if press is None:
            model(ids, past_key_values=cache)
        else:
            with press(model):
                model(ids, past_key_values=cache)
    return [layer.keys[0].numpy().copy() for layer in cache.layers]


def kept_tokens(model, tokens: np.ndarray, policy: dict) -> np.ndarray:
    """Which tokens a press keeps, [L, K, T] bool."""
    full = np.stack(prefill(model, tokens))
    pruned = prefill(model, tokens, make_press(policy))
    if policy["policy"] == "per_head":
        kept = np.ones(full.shape[:3], bool)
        for layer, mask in zip(model.model.layers, kept, strict=True):
            _, heads, places = layer.self_attn.masked_key_indices
            mask[heads, places] = False
        return kept
    equal = (full[:, :, :, None] == np.stack(pruned)[:, :, None]).all(-1)  # [L, K, T, kept]
    assert (equal.sum(2) == 1).all(), "a kept key is that of one token"
    return equal.any(3)


def scores_of(model, tokens: np.ndarray, press: kvpress.BasePress) -> np.ndarray:
    """The scores [L, K, T] that a press gives."""
    scores, score = [], press.score

    def recorded(*arguments):
        result = score(*arguments)
        scores.append(result[0].numpy().copy())
        return result

    press.score = recorded
    prefill(model, tokens, press)
    return np.stack(scores)


def queries_of(model, tokens: np.ndarray) -> np.ndarray:
    """Rotated queries [L, T, N, H] of a llama."""
    queries, rotate = [], modeling_llama.apply_rotary_pos_emb

    def recorded(*arguments, **options):
        query, key = rotate(*arguments, **options)
        queries.append(query[0].transpose(0, 1).numpy().copy())
        return query, key

    with mock.patch.object(modeling_llama, "apply_rotary_pos_emb", recorded):
        prefill(model, tokens)
    return np.stack(queries)


def budget_of(policy: dict, length: int) -> int:
    """Tokens that kvpress keeps of a text of `length` (kvpress.utils.compute_n_kept)."""
    return int(length * (1 - policy["ratio"]))


def gap(scores: np.ndarray, count: int) -> float:
    """How far the `count` best scores are above the rest, relative."""
    best = -np.sort(-scores, axis=None)
    return float((best[count - 1] - best[count]) / best[count - 1])


def margin(policy: dict, scores: np.ndarray) -> float:
    """The smallest gap at a cut of a layer's SnapKV scores [K, T]."""
    budget = budget_of(policy, scores.shape[1])
    if policy["policy"] == "snapkv":
        return min(gap(head, budget) for head in scores)
    gaps, scores = [], scores.copy()
    safe = int(budget * policy["safeguard"])
    if safe > policy["observation"]:  # fewer are all of the window, where order means nothing
        gaps += [gap(head, safe) for head in scores]
        best = np.argsort(-scores, axis=1)[:, :safe]
        np.put_along_axis(scores, best, scores.max(), axis=1)
    return min([*gaps, gap(scores, len(scores) * budget)])


def draw_prompt(model, name: str, length: int) -> tuple[np.ndarray, np.ndarray, float]:
    """The first prompt with wide margins: tokens [T], SnapKV scores [O, L, K, T], margin."""
    draw = np.random.RandomState(zlib.crc32(name.encode()))
    while True:
        tokens = draw.randint(0, tiny_families.VOCAB_SIZE, length).astype(np.int32)
        scores = {
            observation: scores_of(
                model, tokens, kvpress.SnapKVPress(0.5, observation, kernel_size=POOLING)
            )
            for observation in OBSERVATIONS
        }
        smallest = min(
            margin(policy, layer)
            for policy in POLICIES
            if policy["policy"] != "sinks"
            for layer in scores[policy["observation"]]
        )
        if smallest > MARGIN:
            return tokens, np.stack(list(scores.values())), smallest


def build() -> dict[str, np.ndarray]:
    """Every array of the golden file."""
    arrays, prompts = {}, []
    for case in tiny_families.RETENTION_CASES:
        model = load_model(case, "sdpa")
        for length in LENGTHS:
            name = f"{case}_{length}"
            tokens, scores, smallest = draw_prompt(model, name, length)
            kept = np.stack([kept_tokens(model, tokens, policy) for policy in POLICIES])
            budgets = np.array([budget_of(policy, length) for policy in POLICIES], np.int32)
            assert (kept.sum(-1).mean(-1) == budgets[:, None]).all(), "budgets are exact"
            arrays |= {f"tokens_{name}": tokens, f"budgets_{name}": budgets, f"kept_{name}": kept}
            prompts.append(json.dumps({"name": name, "model": case, "length": length}))
            print(f"{name}: margin {smallest:.1e}")
            if name in DETAILED:
                keys = np.stack(prefill(model, tokens)).swapaxes(1, 2)
                observed = scores_of(
                    load_model(case, "eager"), tokens, kvpress.ObservedAttentionPress(0.5)
                )
                arrays |= {f"query_{name}": queries_of(model, tokens), f"key_{name}": keys}
                arrays |= {f"snapkv_{name}": scores, f"observed_{name}": observed}
    policies = [json.dumps(policy) for policy in POLICIES]
    return arrays | {"policies": np.array(policies), "prompts": np.array(prompts)}


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    np.savez_compressed(TARGET, **build())
    print(f"{TARGET.name}: {TARGET.stat().st_size} bytes")
