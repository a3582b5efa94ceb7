"""Reading a config.json so that no field of it is silently ignored.

`Fields` keeps account of what was read. What nobody read must be known to change no logit
(`HARMLESS`), or stand at a value at which it does nothing (`INACTIVE`); anything else is an error.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from kvlab.models.checkpoints.errors import CheckpointError

_TOKEN_FIELDS = (
    "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id "
    "decoder_start_token_id tokenizer_class"
)
_TRAINING_FIELDS = (
    "initializer_range attention_dropout hidden_dropout attn_pdrop embd_pdrop resid_pdrop "
    "summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout "
    "gradient_checkpointing neftune_noise_alpha finetuning_task id2label label2id num_labels "
    "problem_type"
)
# Defaults of a generation loop: sampling is the caller's business, logits do not depend on it.
_GENERATION_FIELDS = (
    "max_length max_new_tokens min_length do_sample early_stopping num_beams num_beam_groups "
    "diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty "
    "no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences "
    "output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id "
    "remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens "
    "task_specific_params prefix"
)
_BOOKKEEPING_FIELDS = (
    "architectures model_type torch_dtype dtype transformers_version _name_or_path name_or_path "
    "_commit_hash use_cache cache_implementation attn_implementation _attn_implementation "
    "_attn_implementation_autoset output_attentions output_hidden_states return_dict torchscript "
    "use_bfloat16 tf_legacy_loss tie_encoder_decoder is_decoder chunk_size_feed_forward "
    "max_sequence_length model_max_length is_llama_config transformers.js_config unsloth_version "
    "unsloth_fixed"
)
HARMLESS = frozenset(
    f"{_TOKEN_FIELDS} {_TRAINING_FIELDS} {_GENERATION_FIELDS} {_BOOKKEEPING_FIELDS}".split()
)

_OFF = (False, None)
# Fields that would change logits and are not supported, with the values that leave logits alone.
INACTIVE: Mapping[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (1, None),
    "pretraining_tp": (1, None),
    "quantization_config": (None,),
    "auto_map": (None, {}),
    "pruned_heads": (None, {}),
    "per_layer_config": (None, {}),
    "cross_attention_hidden_size": (None,),
    "original_max_position_embeddings": (None,),
    "num_local_experts": (None, 0),
    "num_experts": (None, 0),
    "is_encoder_decoder": _OFF,
    "add_cross_attention": _OFF,
    "use_bidirectional_attention": _OFF,
    "rope_interleaved": _OFF,
    "use_mrope": _OFF,
    "attention_bias": _OFF,
    "mlp_bias": _OFF,
    "use_sliding_window": _OFF,
    "sliding_window": (None,),
    "layer_types": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "scale_attn_by_inverse_layer_idx": _OFF,
    "reorder_and_upcast_attn": _OFF,
}

_REQUIRED: Any = object()


class Fields:
    """The fields of one JSON object, and which of them were read.

    Args:
      mapping: the object.
      place: prefix of field names in errors, such as "rope_scaling."; "" at the top.
      harmless: fields that may stay unread.
    """

    def __init__(
        self, mapping: Mapping[str, Any], place: str = "", harmless: Collection[str] = HARMLESS
    ) -> None:
        """Starts with nothing read."""
        self._mapping = mapping
        self._place = place
        self._harmless = harmless
        self._read: set[str] = set()

    def value(self, name: str, absent: Any = _REQUIRED) -> Any:
        """The field as it stands, null included.

        Args:
          name: the field.
          absent: what an absent field means; without it the field is required.

        Raises:
          CheckpointError: the field is required and absent.
        """
        self._read.add(name)
        if name in self._mapping:
            return self._mapping[name]
        if absent is _REQUIRED:
            raise CheckpointError(f"{self._place}{name} is missing, and it is required")
        return absent

    def integer(self, name: str) -> int:
        """A required whole number, or CheckpointError."""
        return self._typed(name, self.value(name), (int,), "a whole number")

    def optional_integer(self, name: str) -> int | None:
        """A whole number, or None where the field is absent or null."""
        return self._optional(name, (int,), "a whole number")

    def number(self, name: str) -> float:
        """A required finite number, or CheckpointError."""
        return float(self._typed(name, self.value(name), (int, float), "a finite number"))

    def optional_number(self, name: str) -> float | None:
        """A finite number, or None where the field is absent or null."""
        value = self._optional(name, (int, float), "a finite number")
        return None if value is None else float(value)

    def flag(self, name: str, absent: bool) -> bool:
        """True or false; `absent` is what an absent field means."""
        return self._typed(name, self.value(name, absent), (bool,), "true or false")

    def text(self, name: str) -> str:
        """A required string, or CheckpointError."""
        return self._typed(name, self.value(name), (str,), "a string")

    def optional_text(self, name: str) -> str | None:
        """A string, or None where the field is absent or null."""
        return self._optional(name, (str,), "a string")

    def optional_list(self, name: str) -> list | None:
        """A list, or None where the field is absent or null."""
        return self._optional(name, (list,), "a list")

    def optional_object(self, name: str) -> dict | None:
        """A JSON object, or None where the field is absent or null."""
        return self._optional(name, (dict,), "an object")

    def finish(self) -> None:
        """Checks what nobody read.

        Raises:
          CheckpointError: a field that is not supported and stands at a value that would change
            logits, or a field that is not known at all.
        """
        for name, value in self._unread():
            if name in INACTIVE and value in INACTIVE[name]:
                continue
            if name in INACTIVE:
                legal = " or ".join(repr(legal) for legal in INACTIVE[name])
                raise CheckpointError(
                    f"{self._place}{name}={value!r} would change logits and is not supported for "
                    f"this model_type; supported: {legal}"
                )
            raise CheckpointError(
                f"{self._place}{name}={value!r} is not a known field of this model_type: it may "
                "change logits, so it is not ignored; remove it if it is known to be harmless"
            )

    def _unread(self) -> Iterator[tuple[str, Any]]:
        for name, value in self._mapping.items():
            if name not in self._read and name not in self._harmless:
                yield name, value

    def _optional(self, name: str, types: tuple[type, ...], wanted: str) -> Any:
        value = self.value(name, None)
        return None if value is None else self._typed(name, value, types, f"{wanted} or null")

    def _typed(self, name: str, value: Any, types: tuple[type, ...], wanted: str) -> Any:
        # bool is an int to Python, and json reads NaN and Infinity
        legal = isinstance(value, types) and (bool in types or not isinstance(value, bool))
        if not legal or (isinstance(value, float) and not math.isfinite(value)):
            raise CheckpointError(f"{self._place}{name}={value!r} given: it must be {wanted}")
        return value
