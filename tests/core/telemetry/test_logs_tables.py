from __future__ import annotations

from headrace.telemetry import logs


def test_a_table_is_boxed_as_tritons_are() -> None:
    assert logs.draw_table(("Model", "Status"), [("digits", "READY")]) == (
        "+--------+--------+\n"
        "| Model  | Status |\n"
        "+--------+--------+\n"
        "| digits | READY  |\n"
        "+--------+--------+\n"
    )  # fmt: skip


def test_a_cell_cannot_add_lines_or_colours() -> None:
    text = logs.draw_table(("Model",), [("a\r\nb\x1b[31m",)])
    assert len(text.splitlines()) == 5
    assert "\x1b" not in text


def test_a_table_without_rows_has_its_head() -> None:
    assert logs.draw_table(("Model",), []) == "+-------+\n| Model |\n+-------+\n+-------+\n"
