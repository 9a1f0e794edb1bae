"""What a profile (`infra/profiles/*.toml`) says of one cluster. Secrets appear by name only.

profile = load_profile("slurm", "", ["nodes=4"])
"""

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import pydantic
from pydantic import Field

from infra.config import Config, apply_overrides, find_named, read_toml, validate
from infra.errors import ConfigError

PROFILES = Path(__file__).parent.parent / "profiles"
STORE_SCHEMES = {"", "file", "s3", "gs", "az"}
MLFLOW_SCHEMES = {"sqlite", "http", "https"}
_SECRET_NAME = re.compile(r"(TOKEN|SECRET|PASSW|API_?KEY|ACCESS_KEY|CREDENTIAL|PRIVATE_KEY)", re.IGNORECASE)
_ENV_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
_CREDENTIALS = re.compile(r"://[^/\s@]*:[^/\s]*@")
_DNS_LABEL = re.compile(r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")
_SIMPLE = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.,:/@%+-]*$")
_CLOCK = re.compile(r"^(\d+-)?\d{1,2}:\d{2}:\d{2}$")
_IMAGE = re.compile(r"^[a-z0-9][a-z0-9._/:-]*(@sha256:[0-9a-f]{64})?$")


def check_text(text: str) -> str:
    """One line without control characters and without a password inside of a URI.

    Raises:
        ValueError: it has one; the sentence never repeats the text, which would put the secret into a log.
    """
    if any(ord(c) < 32 or ord(c) == 127 for c in text):
        raise ValueError("it contains a line break or another control character; write it on one line")
    if _CREDENTIALS.search(text):
        raise ValueError("it contains a password (scheme://user:password@host); name the secret in `secrets` instead")
    return text


def check_uri(text: str, schemes: set[str]) -> str:
    """A path or URI that is safe to write into manifests.

    Raises:
        ValueError: unknown scheme, password, signature in a query, `..`, white space.
    """
    check_text(text)
    if not text or any(c.isspace() for c in text):
        raise ValueError("it is empty or contains white space; give a path or a URI")
    parts = urlsplit(text)
    if parts.scheme not in schemes:
        known = ", ".join(sorted(f"{s}://" for s in schemes if s))
        raise ValueError(f"the scheme {parts.scheme!r} is not known; use {known}" + (" or a path" * ("" in schemes)))
    if parts.query or parts.fragment:
        raise ValueError("it has a query or fragment, where signatures and tokens live; leave it out")
    if ".." in parts.path.split("/"):
        raise ValueError("its path goes through '..'; write the resolved path")
    if parts.scheme in {"s3", "gs", "az", "http", "https"} and not parts.netloc:
        raise ValueError("it names no bucket or host")
    return text


Text = Annotated[str, pydantic.AfterValidator(check_text)]
StoreUri = Annotated[str, pydantic.AfterValidator(lambda v: check_uri(v, STORE_SCHEMES))]
MlflowUri = Annotated[str, pydantic.AfterValidator(lambda v: check_uri(v, MLFLOW_SCHEMES) if v else v)]


def _matching(pattern: re.Pattern[str], form: str) -> pydantic.AfterValidator:
    def check(value: str) -> str:
        if value and not pattern.match(value):
            raise ValueError(f"it is not {form}")
        return value

    return pydantic.AfterValidator(check)


Label = Annotated[str, _matching(_DNS_LABEL, "a DNS label (a-z, 0-9 and '-')")]
Word = Annotated[str, _matching(_SIMPLE, "one word of letters, digits and ._,:/@%+-")]


class _Common(Config):
    store: StoreUri = "store"
    """root of the feature stores: a folder relative to `workdir`, or s3://bucket/prefix, gs://, az://"""
    mlflow: MlflowUri = ""
    """tracking server, http://host:5000; empty: sqlite:///mlflow.db in `workdir`"""
    env: dict[str, Text] = {}
    """further environment variables; nothing secret"""
    secrets: tuple[str, ...] = ()
    """names of environment variables that hold secrets; each platform's page says where their values live"""

    @pydantic.model_validator(mode="after")
    def _names(self) -> "_Common":
        for name in (*self.env, *self.secrets):
            if not _ENV_NAME.match(name):
                raise ValueError(f"{name!r} is not the name of an environment variable; use letters, digits and _")
        for name in self.env:
            if _SECRET_NAME.search(name):
                raise ValueError(
                    f"env.{name} looks like a secret; put its name into `secrets` and its value nowhere here"
                )
        return self

    def variables(self) -> dict[str, str]:
        """Environment of the job, without secrets."""
        return ({"MLFLOW_TRACKING_URI": self.mlflow} if self.mlflow else {}) | dict(sorted(self.env.items()))


class _Cluster(_Common):
    nodes: int = Field(default=1, ge=1)
    """machines that do the work"""
    gpus_per_node: int = Field(default=8, ge=0)
    """0: CPU only"""
    cpus_per_node: int = Field(default=32, ge=1)
    workdir: Text
    """folder that every node sees (NFS, Lustre, a volume): runs/, data/ and a store that is not on object storage"""
    retries: int = Field(default=3, ge=0)
    """times that a job which failed by no fault of the user is started again; it goes on where it was"""

    @pydantic.field_validator("workdir")
    @classmethod
    def _absolute(cls, value: str) -> str:
        if not value.startswith("/") or ".." in value.split("/"):
            raise ValueError("it is not an absolute path")
        return value


class LocalProfile(_Common):
    """This machine."""

    platform: Literal["local"] = "local"


class RayProfile(_Cluster):
    """A running Ray cluster, reached through its job server."""

    platform: Literal["ray"] = "ray"
    address: str = "http://127.0.0.1:8265"
    """of the head's dashboard; loopback through a tunnel, or https://"""
    private_network: bool = False
    """plain http to another machine is acceptable: the token is readable by everyone on the way"""
    auth: Literal["token", "none"] = "token"
    """`none` only for a loopback address: whoever reaches an open job server runs code on the cluster"""

    @pydantic.model_validator(mode="after")
    def _reachable_safely(self) -> "RayProfile":
        check_uri(self.address, {"http", "https"})
        parts = urlsplit(self.address)
        if parts.scheme == "http" and not _is_loopback(parts.hostname or "") and not self.private_network:
            raise ValueError(
                f"address = {self.address!r} sends the token unencrypted to another machine; use an SSH tunnel and "
                "http://127.0.0.1:8265, https://, or set private_network = true"
            )
        if self.auth == "none" and not _is_loopback(parts.hostname or ""):
            raise ValueError(f"auth = 'none' with address = {self.address!r} would use an open job server; use a token")
        return self


class KubeRayProfile(_Cluster):
    """Kubernetes with the KubeRay operator (1.5.1 or newer)."""

    platform: Literal["kuberay"] = "kuberay"
    namespace: Label = "default"
    image: Annotated[str, _matching(_IMAGE, "an image reference in lower case")]
    """with this repository installed in it (infra/images); pin it by digest"""
    min_nodes: int = Field(default=0, ge=0)
    """features: the autoscaler keeps at least these; `nodes` is the most"""
    memory_gib: int = Field(default=128, ge=1)
    """memory of a worker"""
    volume_claim: Label
    """ReadWriteMany claim mounted at `workdir`"""
    secret: Label = "flashdraft"
    """Kubernetes Secret whose keys are the names in `secrets`"""
    service_account: Label = ""
    node_selector: dict[str, Text] = {}
    gpu_resource: Word = "nvidia.com/gpu"

    @pydantic.model_validator(mode="after")
    def _range(self) -> "KubeRayProfile":
        if self.min_nodes > self.nodes:
            raise ValueError(f"min_nodes = {self.min_nodes} is more than nodes = {self.nodes}; lower it")
        return self


class SlurmProfile(_Cluster):
    """Slurm 21.08 or newer, with this repository and its environment on a folder that every node sees."""

    platform: Literal["slurm"] = "slurm"
    code: Text
    """this repository on the cluster"""
    python: Text = ""
    """interpreter with flashdraft installed; empty: `<code>/.venv/bin/python`"""
    partition: Word = ""
    account: Word = ""
    qos: Word = ""
    constraint: Word = ""
    time: Annotated[str, _matching(_CLOCK, "a time as [days-]hours:minutes:seconds")] = "24:00:00"
    gres: Word = "gpu"
    """name of the GPUs: `gpu`, `gpu:h200`"""
    secrets_file: Text = "~/.config/flashdraft/secrets.env"
    """file of NAME=value lines on the cluster, mode 600, read there by the job; used when `secrets` names any"""
    array_limit: int = Field(default=4, ge=1)
    """ablations that run at the same time"""


Profile = LocalProfile | RayProfile | KubeRayProfile | SlurmProfile
KINDS: dict[str, type[Config]] = {
    "local": LocalProfile,
    "ray": RayProfile,
    "kuberay": KubeRayProfile,
    "slurm": SlurmProfile,
}


def load_profile(platform: str, name: str = "", overrides: list[str] | None = None) -> Profile:
    """A profile by name or path; without a name the one called like the platform.

    Raises:
        ConfigError: unknown name, another platform's profile, bad values.
    """
    path = find_named(PROFILES, name or platform, "profile")
    data = apply_overrides(read_toml(path), overrides or [])
    has = data.setdefault("platform", platform)
    if has != platform:
        raise ConfigError(
            f"{path} is a profile for {has!r} and not for {platform!r}; choose --on {has} or another profile"
        )
    return validate(KINDS[platform], data, str(path))  # type: ignore[return-value]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
