"""The layer order of the architecture, read from the imports."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = {
    "specdec.errors": 0,
    "specdec.params": 0,
    "specdec.outputs": 0,
    "specdec.kernels": 1,
    "specdec.cache": 2,
    "specdec.models": 3,
    "specdec.hub": 3,
    "specdec.verifier": 4,
    "specdec.drafters": 5,
    "specdec.engine": 6,
    "specdec.training": 6,
    "specdec.build": 7,
    "specdec.hf": 7,
    "specdec.llm": 7,
    "specdec.bench": 8,
    "specdec.cli": 8,
    "specdec.encode": 7,
    "specdec.server": 8,
}
FOLDERS = {"kernels", "cache", "verifier", "drafters", "training"}


def layer_of(module: str) -> int | None:
    """Layer of a dotted name; None for `specdec` itself and for other packages."""
    return LAYERS.get(".".join(module.split(".")[:2]))


def sources() -> dict[str, Path]:
    """Dotted name → file of every module of the package, each once: through its real folder."""
    paths = [*(ROOT / "specdec").glob("*.py")]
    for folder in [
        *FOLDERS,
        *(f"specdec/{name}" for name in ("engine", "models", "hub", "hf", "bench", "cli", "server")),
    ]:
        paths += (ROOT / folder).rglob("*.py")
    named = {}
    for path in paths:
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        parts = parts if parts[0] == "specdec" else ["specdec", *parts]
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return named


def imports(path: Path) -> list[str]:
    """Every `specdec` module that a file imports, also inside functions."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in found if name.split(".")[0] == "specdec"]


def test_every_module_has_a_layer() -> None:
    missing = [name for name in sources() if name != "specdec" and layer_of(name) is None]
    assert not missing


@pytest.mark.parametrize("module", sorted(set(sources()) - {"specdec"}))
def test_imports_go_down(module: str) -> None:
    own = layer_of(module)
    assert own is not None
    up = [name for name in imports(sources()[module]) if (layer_of(name) or 0) > own]
    assert not up, f"{module} (layer {own}) imports {up}"


def test_links_are_relative_and_kernels_has_no_init() -> None:
    for folder in FOLDERS:
        link = ROOT / "specdec" / folder
        assert link.is_symlink() and str(link.readlink()) == f"../{folder}"
    assert not (ROOT / "kernels" / "__init__.py").exists()  # a package of that name exists elsewhere


def test_no_relative_imports() -> None:
    for path in sources().values():
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.ImportFrom) and node.level), path
