"""Routing tables that are wrong: each error names the parameter, its value and the rule."""

from __future__ import annotations

import pytest

from headrace import ConfigError, Dependency
from headrace_router.routing_table import RequestValue
from headrace_router.table_parameters import read_table, table_problems

from .conftest import config, router

GOOD = "a = 1, b = 2"


def test_all_parameters_are_read_together() -> None:
    table = read_table(
        config(
            router(
                " digits:3=90,new:model = 7.5 , a:b:12=2.5",
                sticky="header: X-User",
                rules="header:X-Canary = yes -> digits:3; parameter:tier -> a:b:12",
            )
        )
    )
    assert [target.dependency for target in table.targets] == [
        Dependency("digits", 3),
        Dependency("new:model", -1),
        Dependency("a:b", 12),
    ]
    assert [target.version for target in table.targets] == ["3", "", "12"]
    assert table.weights == [90, 7.5, 2.5]
    assert table.sticky == RequestValue("header", "x-user")
    assert table.reads_headers
    assert [(str(rule.source), rule.value, rule.target) for rule in table.rules] == [
        ("header:x-canary", "yes", 0),
        ("parameter:tier", None, 2),
    ]


@pytest.mark.parametrize(
    ("targets", "why"),
    [
        ("", "is empty: expected targets with their weights, such as 'digits:1 = 90, digits:2 = 10'"),
        ("a", "'a' is no target with its weight, such as 'digits:2 = 10'"),
        ("a = 1, ", "'' is no target with its weight"),
        ("= 1", "'= 1' is no target with its weight"),
        ("a = 0, b = 0", "all weights are 0; at least one must be above 0"),
        ("a = nan", "the weight of 'a' is NaN; expected a number from 0 to 1,000,000"),
        ("a = 1, b = inf", "the weight of 'b' is Infinity; expected"),
        ("a = -1, b = 2", "the weight of 'a' is -1.0; expected"),
        ("a = 2000000", "the weight of 'a' is 2000000.0; expected"),
        ("a = many", """the weight of 'a' is "many"; expected"""),
        ("a =", "the weight of 'a' is NaN; expected"),
        ("a = 1, a = 2", "'a' is named twice"),
        ("a = 1, r = 2", "'r' is the router itself"),
        ("r:2 = 2", "'r:2' is the router itself"),
        (":3 = 2", "':3' names no model; expected 'model' or 'model:version'"),
        (", ".join(f"m{n} = 1" for n in range(65)), "65 targets; the limit is 64"),
    ],
)
def test_wrong_targets_are_refused(targets: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_table(config(router(targets)))
    shown = f"is '{targets[:60]}{'...' if len(targets) > 60 else ''}'" if targets else "is empty"
    assert caught.value.message.startswith(f"router 'r': parameter 'scheduler.targets' {shown}: ")
    assert why in caught.value.message
    assert caught.value.field == "parameters['scheduler.targets']"


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("sticky", "", "'' names no place in a request; expected 'header:<name>' or 'parameter:<name>' or 'sequence'"),
        ("sticky", "user", "'user' names no place in a request"),
        ("sticky", "header:", "'header:' names no place in a request"),
        ("sticky", "header:x user", "'x user' is no name of a header"),
        ("sticky", "cookie:x", "'cookie:x' names no place in a request"),
        ("rules", "header:x=1", "'header:x=1' is no rule, such as 'header:x-canary = yes -> digits:2'"),
        ("rules", "header:x -> c", "'c' is no target; the targets are a, b"),
        ("rules", "header:x -> b;", "'' is no rule"),
        ("rules", "sequence -> b", "'sequence' names no place in a request"),
    ],
)
def test_other_wrong_parameters_are_refused(name: str, value: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_table(config(router(GOOD, **{name: value})))
    assert f"router 'r': parameter 'scheduler.{name}' " in caught.value.message
    assert why in caught.value.message
    assert caught.value.field == f"parameters['scheduler.{name}']"


def test_every_wrong_parameter_is_listed() -> None:
    targets, sticky, rules = (f"parameters['scheduler.{name}']" for name in ("targets", "sticky", "rules"))
    for text, fields in (("a = 1", [sticky, rules]), ("a", [targets, sticky])):
        wrong = table_problems(config(router(text, sticky="user", rules="b")))
        assert [problem.field for problem in wrong] == fields
    assert table_problems(config(router("a = 1"))) == []


def test_a_table_without_targets_is_empty() -> None:
    with pytest.raises(ConfigError, match=r"parameter 'scheduler.targets' is empty: expected targets"):
        read_table(config('parameters { key: "scheduler" value { string_value: "router" } }'))
