"""Who may import whom (docs/architecture.md)."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
OURS = {"infra", "kernels", "features", "pipeline", "trainer", "eval"}
ALLOWED = {
    "infra": set(),
    "kernels": set(),
    "features": {"infra"},
    "pipeline": {"features", "infra"},
    "trainer.drafter": {"kernels", "features", "infra"},
    "eval": {"trainer.drafter", "kernels", "features", "infra"},
    "trainer": {"trainer.drafter", "eval", "kernels", "features", "infra"},
}
# what a GPU machine with nothing but these can run
LEAN = {"torch", "triton", "transformers", "numpy", "pydantic", "safetensors", "tomli_w"}


def layer(module: str) -> str:
    return "trainer.drafter" if module.startswith("trainer.drafter") else module.split(".")[0]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
            found |= {
                f"{node.module}.{a.name}" for a in node.names if f"{node.module}.{a.name}".startswith("trainer.drafter")
            }
        elif isinstance(node, ast.ImportFrom) and node.level:
            pytest.fail(f"{path} has a relative import; write the package's name")
    return found


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", sorted(OURS))
def test_a_layer_imports_only_those_above_it(package):
    for path in files(package):
        own = layer(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for module in imports(path):
            if module.split(".")[0] in OURS and layer(module) != own:
                assert layer(module) in ALLOWED[own], f"{path.relative_to(ROOT)} imports {module}"


def test_features_and_drafter_stay_lean():
    for path in files("features"):
        assert not {m.split(".")[0] for m in imports(path)} & {"ray", "deepspeed", "mlflow"}, path
    stdlib = __import__("sys").stdlib_module_names
    for path in [*files("kernels"), *files("trainer/drafter")]:
        if path.name.startswith(("bench", "peer")):
            continue  # they call what they compare with, where it is installed
        for module in imports(path):
            top = module.split(".")[0]
            assert top in LEAN | OURS or top in stdlib, f"{path.relative_to(ROOT)} imports {module}"


def test_kernels_init_is_empty():
    """transformers imports a package called `kernels` when it can: ours must not do anything on import."""
    assert (ROOT / "kernels" / "__init__.py").read_text().strip() == ""


def test_configurations_import_without_torch():
    import subprocess
    import sys

    code = (
        "import sys, features.target_config, trainer.config, pipeline.config, features.spec;"
        "sys.exit(any(m in sys.modules for m in ('torch', 'ray', 'deepspeed')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
