"""README's tables: rendered from data, never by hand."""

import pytest

from benchmarks import render
from benchmarks.server import parse_metrics


def test_a_slot_is_filled_and_stays_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(render.TABLES, "one", lambda: "| new |")
    text = "before\n<!-- table:one -->\n| old |\n| rows |\n<!-- end:one -->\nafter\n"
    filled = render.render(text)
    assert filled == "before\n<!-- table:one -->\n| new |\n<!-- end:one -->\nafter\n"
    assert render.render(filled) == filled


def test_an_unknown_table_is_an_error() -> None:
    with pytest.raises(KeyError, match="nothing"):
        render.render("<!-- table:nothing -->\n<!-- end:nothing -->")


def test_readme_holds_every_table() -> None:
    text = render.README.read_text(encoding="utf-8")
    for name in render.TABLES:
        assert f"<!-- table:{name} -->" in text, f"README.md has no place for the table {name}"


def test_metrics_lose_their_labels_and_add_up() -> None:
    text = '# HELP vllm:a b\nvllm:a{engine="0"} 1.5\nvllm:a{engine="1"} 2\nvllm:b_total 3.0\nother 1\n'
    assert parse_metrics(text) == {"vllm:a": 3.5, "vllm:b_total": 3.0}
