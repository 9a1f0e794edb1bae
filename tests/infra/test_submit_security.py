"""Nothing of ours executes what it reads: no pickles, no shell strings, no remote code unless a target file says so."""

import ast
from pathlib import Path

import pytest

from infra.config import Config, validate
from infra.errors import ConfigError

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("infra", "kernels", "features", "pipeline", "trainer", "eval")
FORBIDDEN = {"pickle.load", "pickle.loads", "yaml.load", "os.system", "eval", "exec", "marshal.loads", "dill.load"}
UNSAFE = {"weights_only": False, "allow_pickle": True, "shell": True, "trust_remote_code": True, "verify": False}


def calls(package):
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", ast.unparse(node.func), node


@pytest.mark.parametrize("package", PACKAGES)
def test_no_call_executes_data(package):
    for where, name, node in calls(package):
        assert name not in FORBIDDEN, f"{where} calls {name}"
        for keyword in node.keywords:
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            assert keyword.arg not in UNSAFE or value is not UNSAFE[keyword.arg], f"{where}: {keyword.arg}={value}"


@pytest.mark.parametrize("package", ["features", "trainer", "eval"])
def test_torch_files_are_read_nowhere_but_in_the_comparison_with_other_formats(package):
    """torch.load is safe by default since 2.6 (weights_only); checkpoints of others are safetensors all the same."""
    found = {where.split(":")[0] for where, name, _ in calls(package) if name == "torch.load"}
    assert found <= {"features/bench.py"}


def test_errors_mask_passwords_and_signatures():
    class Thing(Config):
        uri: int

    with pytest.raises(ConfigError) as e:
        validate(Thing, {"uri": "s3://key:hunter2@bucket/x and https://h/p?X-Amz-Signature=hunter2"}, "x")
    assert "hunter2" not in str(e.value) and "s3://***@bucket" in str(e.value)
