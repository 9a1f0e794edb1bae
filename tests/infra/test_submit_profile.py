"""Profiles and words: what is refused, and in which sentence."""

import pytest

from infra.errors import ConfigError
from infra.submit.cli import parse, plan
from infra.submit.profile import KINDS, PROFILES, load_profile


def test_every_profile_of_the_repository_loads():
    names = sorted(p.stem for p in PROFILES.glob("*.toml"))
    assert set(KINDS) <= set(names)
    for name in names:
        platform = next(k for k in KINDS if name.startswith(k))
        assert load_profile(platform, name).platform == platform


@pytest.mark.parametrize(
    "platform, override, says",
    [
        ("ray", 'address="http://10.0.0.5:8265"', "private_network"),
        ("ray", 'address="ftp://127.0.0.1"', "scheme"),
        ("ray", 'address="https://user:pw@head"', "password"),
        ("ray", 'store="s3://key:hunter2@bucket/x"', "password"),
        ("ray", 'store="s3://bucket/x?X-Amz-Signature=hunter2"', "query"),
        ("ray", 'store="s3://"', "no bucket"),
        ("ray", 'store="../elsewhere"', r"'\.\.'"),
        ("ray", 'store="http://bucket"', "scheme 'http'"),
        ("ray", 'mlflow="postgresql://u:hunter2@db/mlflow"', "password"),
        ("ray", 'mlflow="file:///runs"', "scheme 'file'"),
        ("ray", 'env.HF_TOKEN="hunter2"', "looks like a secret"),
        ("ray", 'env.A="x\\ny"', "line break"),
        ("ray", 'secrets=["HF_TOKEN=hunter2"]', "not the name"),
        ("ray", 'workdir="runs"', "absolute"),
        ("ray", "workdirs=1", "did you mean 'workdir'"),
        ("kuberay", 'namespace="Team A"', "DNS label"),
        ("kuberay", 'image="x y"', "image reference"),
        ("kuberay", "min_nodes=9", "min_nodes = 9"),
        ("slurm", 'partition="gpu\\n#SBATCH --uid=0"', "one word"),
        ("slurm", 'time="tomorrow"', "hours:minutes:seconds"),
    ],
)
def test_bad_profiles_are_refused_without_repeating_secrets(platform, override, says):
    with pytest.raises(ConfigError, match=says) as e:
        load_profile(platform, "", [override])
    if override.count("hunter2") and "secrets=" not in override:
        assert "hunter2" not in str(e.value)


def test_no_token_only_on_loopback():
    assert load_profile("ray", "", ['auth="none"']).auth == "none"
    with pytest.raises(ConfigError, match="open job server"):
        load_profile("ray", "", ['auth="none"', 'address="https://head:8265"'])


def test_a_profile_of_another_platform_is_refused():
    with pytest.raises(ConfigError, match="--on ray"):
        load_profile("slurm", "ray")


@pytest.mark.parametrize(
    "words, says",
    [
        (["features"], "MODEL="),
        (["features", "MODEL=tiny", "qwen"], "NAME=value"),
        (["features", "MODEL=tiny", "DRAFTER=x"], "does not know DRAFTER"),
        (["features", "MODEL=tiny", "store_root=s3://a:hunter2@b"], "password"),
        (["features", "MODEL=tiny\n#SBATCH --uid=0"], "line break"),
        (["train", "MODEL=tiny"], "data.store="),
        (["eval", "MODEL=tiny", "DRAFTER=runs/x"], "store="),
    ],
)
def test_bad_words_are_refused(words, says):
    with pytest.raises(ConfigError, match=says) as e:
        plan(parse([words[0], "--on", "ray", *words[1:]]))
    assert "hunter2" not in str(e.value)
