"""Decoder configs as JSON: what lies beside kvlab's own checkpoints and in run manifests.

Every dataclass becomes an object that names its class under "type", with its module where it is not
kvlab's own (`module:Class`); tuples become lists.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from kvlab.models.config import DecoderConfig, LayerNorm, RMSNorm
from kvlab.ops.rope import DynamicNTK, LinearScaling, Llama3Scaling, Rope, YarnScaling

_CLASSES = {
    cls.__name__: cls
    for cls in (
        DecoderConfig,
        RMSNorm,
        LayerNorm,
        Rope,
        LinearScaling,
        DynamicNTK,
        Llama3Scaling,
        YarnScaling,
    )
}


def config_to_json(config: DecoderConfig) -> str:
    """Writes a config as JSON text, one field a line."""
    return json.dumps(encoded(config), indent=2) + "\n"


def config_from_json(text: str) -> DecoderConfig:
    """Reads what `config_to_json` wrote.

    Args:
      text: JSON. Fields that have a default may be absent.

    Raises:
      ValueError: not JSON, not a config, a field that is missing, unknown or out of range.
    """
    try:
        config = decoded(json.loads(text), _CLASSES)
    except json.JSONDecodeError as error:
        raise ValueError(f"the config is not JSON: {error}") from error
    except TypeError as error:
        raise ValueError(f"the config does not fit: {error}") from error
    if not isinstance(config, DecoderConfig):
        raise ValueError('the config is not a DecoderConfig; it needs "type": "DecoderConfig"')
    return config


def encoded(value: Any) -> Any:
    """Turns nested frozen dataclasses into what JSON can hold.

    Args:
      value: a dataclass, tuple or plain value, nested to any depth.

    Returns:
      Dictionaries that name their class under "type", lists and plain values.
    """
    if dataclasses.is_dataclass(value):
        fields = {f.name: encoded(getattr(value, f.name)) for f in dataclasses.fields(value)}
        cls = type(value)
        known = cls.__module__.startswith("kvlab.")
        return {"type": cls.__name__ if known else f"{cls.__module__}:{cls.__name__}"} | fields
    if isinstance(value, tuple):
        return [encoded(item) for item in value]
    return value


def decoded(value: Any, classes: Mapping[str, type]) -> Any:
    """Turns what `encoded` gave back into dataclasses and tuples.

    Args:
      value: parsed JSON.
      classes: the classes that "type" may name.

    Raises:
      ValueError: an object without a known "type", a field that is missing, unknown or out of
        range.
      TypeError: a field of another type than its class works with.
    """
    if isinstance(value, list):
        return tuple(decoded(item, classes) for item in value)
    if not isinstance(value, dict):
        return value
    fields = {name: decoded(item, classes) for name, item in value.items()}
    name = fields.pop("type", None)
    if name not in classes:
        raise ValueError(f"type {name!r} is not known; legal values: {', '.join(classes)}")
    known = dataclasses.fields(classes[name])
    if unknown := sorted(fields.keys() - {field.name for field in known}):
        raise ValueError(f"{name} has no field {', '.join(unknown)}")
    for field in known:
        optional = {field.default, field.default_factory} != {dataclasses.MISSING}
        if not optional and field.name not in fields:
            raise ValueError(f"{name} lacks the field {field.name}")
    return classes[name](**fields)
