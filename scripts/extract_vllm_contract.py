"""Look up what ZIPFUSION leans on (``tests/engine/contracts/items.py``, and all that it imports) in a vLLM source tree, and write what is there as JSON.

    python scripts/extract_vllm_contract.py path/to/vllm tests/engine/contracts/vllm-0.33.0.json

The tree is the folder ``vllm`` of an unpacked wheel or a checkout; nothing of it is imported. Signatures and names are written, and whether the
expected expressions occur: no code of vLLM's.
"""

import ast
import json
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.engine.contracts.items import CONTRACTS

if TYPE_CHECKING:
    from tests.engine.contracts.items import Contract

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
REPOSITORY = Path(__file__).resolve().parents[1]
OUR_FOLDERS = ("zipfusion_vllm", "kernels", "patches")
KINDS = ("property", "classmethod", "staticmethod", "cache")


def extract(root: Path) -> dict[str, dict[str, Any] | None]:
    """{"file::name": what is there, or None} for every contract, in the tree of the package ``vllm`` at ``root``; imports as "import module name"."""
    found = {f"{contract.file}::{contract.name}": look_up(root, contract) for contract in CONTRACTS}
    return found | {import_key(*item): {} if is_there(root, *item) else None for item in our_imports()}


def our_imports() -> list[tuple[str, str]]:
    """(module of vLLM, name in it) for every import in our packages; the name is empty for ``import vllm.module``."""
    found: set[tuple[str, str]] = set()
    for file in sorted(file for folder in OUR_FOLDERS for file in (REPOSITORY / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm":
                found |= {(node.module, alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {(alias.name, "") for alias in node.names if alias.name.split(".")[0] == "vllm"}
    return sorted(found)


def import_key(module: str, name: str) -> str:
    return f"import {module} {name}".rstrip()


def is_there(root: Path, module: str, name: str) -> bool:
    """Whether ``from module import name`` finds something: a definition, a value, an import, or a submodule."""
    file = module_file(root, module)
    if file is None:
        return False
    tree = parse(file)
    assert tree is not None
    return not name or name in _names(tree) or module_file(root, f"{module}.{name}") is not None


def module_file(root: Path, module: str) -> Path | None:
    """The file of ``vllm.a.b``, where ``root`` is that of ``vllm``."""
    path = root.joinpath(*module.split(".")[1:])
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


def look_up(root: Path, contract: "Contract") -> dict[str, Any] | None:
    """Parameters, kind, fields, and which of the expected expressions occur; None if the definition is gone."""
    node = find(root / contract.file, contract.name.split("."))
    if node is None:
        return None
    body = ast.unparse(node)
    found: dict[str, Any] = {"contains": {text: text in body for text in contract.contains}}
    if isinstance(node, ast.ClassDef):
        found["fields"] = [
            item.target.id
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        ]
    else:
        found["parameters"] = parameters(node.args)
        decorators = [
            ast.unparse(decorator).replace("cached_property", "property") for decorator in node.decorator_list
        ]
        found["kind"] = next((kind for kind in KINDS if kind in decorators), "")
    return found


def find(file: Path, path: list[str]) -> Definition | None:
    """The definition ``path`` (["Class", "method"]) in ``file``; of several with one name (overloads, branches) the last."""
    tree = parse(file)
    if tree is None:
        return None
    node: ast.AST = tree
    for name in path:
        candidates = [item for item in _definitions(node) if item.name == name]
        if not candidates:
            return None
        node = candidates[-1]
    assert isinstance(node, Definition)
    return node


@cache
def parse(file: Path) -> ast.Module | None:
    return ast.parse(file.read_text(encoding="utf-8")) if file.exists() else None


def parameters(arguments: ast.arguments) -> list[str]:
    """Names in order, ``*args`` and ``**kwargs`` with their stars."""
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    names += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    names += [argument.arg for argument in arguments.kwonlyargs]
    return names + ([f"**{arguments.kwarg.arg}"] if arguments.kwarg else [])


def _definitions(node: ast.AST) -> list[Definition]:
    """Definitions directly in ``node``, those behind an ``if`` or ``try`` included."""
    found: list[Definition] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            found.append(child)
        elif isinstance(child, ast.If | ast.Try):
            found += _definitions(child)
    return found


def _names(node: ast.AST) -> set[str]:
    """Names that the statements directly in ``node`` bind, those behind an ``if`` or ``try`` included."""
    names: set[str] = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            names.add(child.name)
        elif isinstance(child, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.split(".")[0] for alias in child.names}
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(child, ast.If | ast.Try):
            names |= _names(child)
    return names


def main() -> None:
    if len(sys.argv) != 3 or not (Path(sys.argv[1]) / "v1").is_dir():
        sys.exit("usage: extract_vllm_contract.py FOLDER_OF_PACKAGE_VLLM OUT.json")
    Path(sys.argv[2]).write_text(json.dumps(extract(Path(sys.argv[1])), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
