"""Look up what ZIPFUSION leans on (``tests/engine/contracts/items.py``) in a vLLM source tree, and write what is there as JSON.

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
KINDS = ("property", "classmethod", "staticmethod", "cache")


def extract(root: Path) -> dict[str, dict[str, Any] | None]:
    """{"file::name": what is there, or None} for every contract, in the tree of the package ``vllm`` at ``root``."""
    return {f"{contract.file}::{contract.name}": look_up(root, contract) for contract in CONTRACTS}


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


def main() -> None:
    if len(sys.argv) != 3 or not (Path(sys.argv[1]) / "v1").is_dir():
        sys.exit("usage: extract_vllm_contract.py FOLDER_OF_PACKAGE_VLLM OUT.json")
    Path(sys.argv[2]).write_text(json.dumps(extract(Path(sys.argv[1])), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
