"""Configuration: frozen pydantic models read from TOML, changed by dotted `key=value` overrides.

    cfg = load_config(SftConfig, "trainer/recipes/sft.toml", ["train.steps=50", "optim.lr=1e-3"])

Values of overrides are TOML (`train.steps=50`, `name="a"`, `taps=[1,8]`); a bare word that is none is a string.
"""

import difflib
import re
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

import pydantic
import tomli_w

from infra.errors import ConfigError


class Config(pydantic.BaseModel):
    """Base of every configuration: immutable, unknown keys refused."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")


C = TypeVar("C", bound=Config)


def read_toml(path: str | Path) -> dict[str, Any]:
    """The content of a TOML file.

    Raises:
        ConfigError: the file is absent or is not TOML.
    """
    path = Path(path)
    try:
        with open(path, "rb") as f:
            return tomllib.load(f)
    except FileNotFoundError:
        raise ConfigError(f"configuration file {str(path)!r} does not exist; give the path of a TOML file") from None
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"configuration file {str(path)!r} is not valid TOML ({e}); correct that line") from None


def parse_override(text: str) -> tuple[list[str], Any]:
    """`"train.steps=50"` -> `(["train", "steps"], 50)`.

    Values are TOML; what is none is text, also within a list: make and shells take the quotes of `rows=["a","b"]`.
    """
    key, eq, value = text.partition("=")
    key = key.strip()
    if not eq or not key or any(not part for part in key.split(".")):
        raise ConfigError(f"override {text!r} is not of the form section.key=value; write for example train.steps=50")
    return key.split("."), _parse_value(value.strip())


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        inner = text[1:-1]
        if (text[:1], text[-1:]) == ("[", "]") and not set(inner) & set("[]{}\"'"):
            return [_parse_value(part.strip()) for part in inner.split(",") if part.strip()]
        return text


def apply_overrides(data: dict[str, Any], overrides: typing.Iterable[str]) -> dict[str, Any]:
    """A deep copy of `data` with the overrides set; sections that do not exist are made."""
    data = _copy(data)
    for text in overrides:
        keys, value = parse_override(text)
        node = data
        for key in keys[:-1]:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise ConfigError(f"override {text!r} goes through {key!r}, which is a value and not a section")
        node[keys[-1]] = value
    return data


def validate(model: type[C], data: dict[str, Any], what: str) -> C:
    """`data` as a `model`; every error of pydantic as one sentence that names key, value and remedy.

    Raises:
        ConfigError: unknown key (with the nearest known one), wrong type, or a value out of range.
    """
    try:
        return model.model_validate(data)
    except pydantic.ValidationError as e:
        raise ConfigError("; ".join(_explain(model, err, what) for err in e.errors())) from None


def load_config(model: type[C], path: str | Path, overrides: typing.Iterable[str] = ()) -> C:
    """Read a TOML file, apply overrides and validate.

    Raises:
        ConfigError: see `read_toml`, `parse_override`, `validate`.
    """
    return validate(model, apply_overrides(read_toml(path), overrides), str(path))


def find_named(folder: Path, name: str, what: str) -> Path:
    """`qwen3-8b` -> `<folder>/qwen3-8b.toml`; a path to a TOML file stays itself.

    Raises:
        ConfigError: no such name; the sentence lists the known ones and the nearest.
    """
    if name.endswith(".toml"):
        if Path(name).is_file():
            return Path(name)
        raise ConfigError(f"{what} file {name!r} does not exist; give the path of a TOML file")
    path = folder / f"{name}.toml"
    if path.is_file():
        return path
    known = sorted(p.stem for p in folder.glob("*.toml"))
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(f"unknown {what} {name!r}: {hint}known are {', '.join(known)}, or give the path of a TOML file")


def to_toml(cfg: Config) -> str:
    """The resolved configuration as TOML (fields that are None are left out: TOML has no null)."""
    return tomli_w.dumps(_without_none(cfg.model_dump(mode="json")))


def save_toml(cfg: Config, path: str | Path) -> None:
    Path(path).write_text(to_toml(cfg))


def _copy(data: Any) -> Any:
    return {k: _copy(v) for k, v in data.items()} if isinstance(data, dict) else data


def _without_none(data: Any) -> Any:
    if isinstance(data, dict):
        return {k: _without_none(v) for k, v in data.items() if v is not None}
    if isinstance(data, list):
        return [_without_none(v) for v in data]
    return data


def _explain(model: type[Config], err: Any, what: str) -> str:
    key = ".".join(str(k) for k in err["loc"])
    if err["type"] == "extra_forbidden":
        known = _known_keys(model, err["loc"][:-1])
        near = difflib.get_close_matches(str(err["loc"][-1]), known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return f"{what}: unknown key {key!r}: {hint}known keys there are {', '.join(known)}"
    if err["type"] == "missing":
        return f"{what}: key {key!r} is missing; add it"
    message = err["msg"].removeprefix("Value error, ")
    if not key:  # a cross-check of the whole model: its own sentence says everything
        return f"{what}: {message}"
    return f"{what}: {key} = {_without_secrets(repr(err['input']))} is not accepted: {message}"


def _without_secrets(text: str) -> str:
    """Passwords (`scheme://user:password@`) and signatures (`scheme://host/path?…`) masked: errors end up in logs."""
    return re.sub(r"(://[^\s?'\"]*)\?[^\s'\"]*", r"\1?***", re.sub(r"://[^/\s@]*:[^/\s]*@", "://***@", text))


def _known_keys(model: type, loc: tuple) -> list[str]:
    for part in loc:
        if not (isinstance(model, type) and issubclass(model, pydantic.BaseModel)):
            return []
        field = model.model_fields.get(str(part))
        if field is None:
            continue  # the tag of a discriminated union
        model = _model_of(field.annotation)
    return sorted(model.model_fields) if isinstance(model, type) and issubclass(model, pydantic.BaseModel) else []


def _model_of(annotation: Any) -> Any:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        models = [a for a in typing.get_args(annotation) if isinstance(a, type) and issubclass(a, pydantic.BaseModel)]
        return models[0] if models else annotation
    return annotation
