from __future__ import annotations

from headrace.telemetry import tables


def test_a_table_is_boxed_as_tritons_are() -> None:
    assert tables.draw(("Model", "Status"), [("digits", "READY")]) == (
        "+--------+--------+\n"
        "| Model  | Status |\n"
        "+--------+--------+\n"
        "| digits | READY  |\n"
        "+--------+--------+\n"
    )  # fmt: skip


def test_a_cell_cannot_add_lines_or_colours() -> None:
    text = tables.draw(("Model",), [("a\r\nb\x1b[31m",)])
    assert len(text.splitlines()) == 5
    assert "\x1b" not in text


def test_a_table_without_rows_has_its_head() -> None:
    assert tables.draw(("Model",), []) == "+-------+\n| Model |\n+-------+\n+-------+\n"
