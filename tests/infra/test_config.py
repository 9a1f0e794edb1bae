import pytest
from pydantic import Field

from infra.config import (
    Config,
    apply_overrides,
    find_named,
    load_config,
    parse_override,
    read_toml,
    save_toml,
    validate,
)
from infra.errors import ConfigError


class Inner(Config):
    steps: int = Field(default=3, ge=1)
    ratio: float | None = None


class Outer(Config):
    name: str = "a"
    ids: tuple[int, ...] = (1, 2)
    inner: Inner = Inner()


@pytest.mark.parametrize(
    ("text", "keys", "value"),
    [
        ("train.steps=50", ["train", "steps"], 50),
        ("a.b.c=1e-3", ["a", "b", "c"], 1e-3),
        ("name=hello world", ["name"], "hello world"),
        ('name="50"', ["name"], "50"),
        ("ids=[1, 8]", ["ids"], [1, 8]),
        ("rows=[sft-decay, rl,3]", ["rows"], ["sft-decay", "rl", 3]),
        ("name=[a]{b}", ["name"], "[a]{b}"),
        ("flag=true", ["flag"], True),
        ("path=s3://bucket/x=y", ["path"], "s3://bucket/x=y"),
    ],
)
def test_override_values(text, keys, value):
    assert parse_override(text) == (keys, value)


@pytest.mark.parametrize("text", ["steps", "=3", "a..b=1", ".a=1"])
def test_override_without_key_or_value(text):
    with pytest.raises(ConfigError, match="not of the form"):
        parse_override(text)


def test_overrides_leave_the_original_alone():
    data = {"inner": {"steps": 3}}
    assert apply_overrides(data, ["inner.steps=5", "new.x=1"]) == {"inner": {"steps": 5}, "new": {"x": 1}}
    assert data == {"inner": {"steps": 3}}


def test_override_through_a_value():
    with pytest.raises(ConfigError, match="'name', which is a value"):
        apply_overrides({"name": "a"}, ["name.x=1"])


def test_unknown_key_names_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown key 'inner\.step': did you mean 'steps'\?"):
        validate(Outer, {"inner": {"step": 5}}, "r.toml")


def test_value_out_of_range_names_key_and_value():
    with pytest.raises(ConfigError, match=r"r\.toml: inner\.steps = 0 is not accepted"):
        validate(Outer, {"inner": {"steps": 0}}, "r.toml")


def test_round_trip_through_toml(tmp_path):
    cfg = load_config(Outer, _write(tmp_path, 'name = "b"\n'), ["inner.steps=7", "ids=[3]"])
    save_toml(cfg, tmp_path / "out.toml")
    assert load_config(Outer, tmp_path / "out.toml") == cfg
    assert cfg.inner.steps == 7 and cfg.ids == (3,)


def test_broken_and_missing_files(tmp_path):
    with pytest.raises(ConfigError, match="not valid TOML"):
        read_toml(_write(tmp_path, "a = = 1"))
    with pytest.raises(ConfigError, match="does not exist"):
        read_toml(tmp_path / "none.toml")


def test_find_named_lists_the_known(tmp_path):
    (tmp_path / "qwen3-8b.toml").write_text("")
    with pytest.raises(ConfigError, match=r"unknown MODEL 'qwen3-8': did you mean 'qwen3-8b'\?"):
        find_named(tmp_path, "qwen3-8", "MODEL")
    assert find_named(tmp_path, "qwen3-8b", "MODEL").name == "qwen3-8b.toml"
    with pytest.raises(ConfigError, match="does not exist"):
        find_named(tmp_path, "x/y.toml", "MODEL")


def _write(folder, text):
    path = folder / "x.toml"
    path.write_text(text)
    return path
