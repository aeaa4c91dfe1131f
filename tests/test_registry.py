"""Registries: names, refusals, entry points of other packages, and the user's own files."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from coterie.aggregators import AGGREGATORS
from coterie.errors import KnobError, UserCodeError
from coterie.methods import METHODS, Method
from coterie.registry import (
    IMPORTS,
    Computed,
    Registry,
    RunSizes,
    import_from_environment,
    import_user_code,
)
from coterie.rules import RULES, Rule, WeightedAveraging

RUN = RunSizes(own_examples=10, peers={"a": 20, "b": 10, "c": 30}, steps=60)


def new(group: str = "coterie.nothing") -> Registry[Any]:
    return Registry("thing", group)


def test_a_thing_is_registered_by_a_call_or_a_decorator_and_found_by_name() -> None:
    registry = new()
    assert registry.register("one", dict) is dict

    @registry.register("two", benchmark_settings=[{"a": 1}])
    def second() -> None:
        """Say what it is.

        And more.
        """

    assert list(registry) == ["one", "two"]
    assert len(registry) == 2
    assert registry["two"] is second
    assert registry.entry("two").description == "Say what it is."
    assert registry.entry("two").benchmark_settings == [{"a": 1}]
    assert "two" in registry
    assert "three" not in registry
    with pytest.raises(KnobError, match="unknown thing 'three'; the things are one, two"):
        registry["three"]


def test_a_name_is_taken_once_but_for_the_same_definition() -> None:
    registry = new()

    def defined() -> Any:
        def same() -> None: ...

        return same

    first, again = defined(), defined()
    registry.register("one", first)
    registry.register("one", first)
    # as when a cell of a notebook is run again
    assert registry.register("one", again) is registry["one"]
    with pytest.raises(KnobError, match="the thing 'one' is already"):
        registry.register("one", dict)
    registry.register("two", lambda: 1)
    with pytest.raises(KnobError, match="choose another name"):
        registry.register("two", lambda: 2)


def test_building_takes_defaults_knobs_and_facts_of_the_run() -> None:
    entry = RULES.entry("pooled")
    assert entry.build({}, RUN) == WeightedAveraging(6 / 7, {"a": 1 / 3, "b": 1 / 6, "c": 1 / 2})
    # it would not be pooled
    with pytest.raises(KnobError, match="'pooled' takes no `tau`; it takes aggregator"):
        entry.build({"tau": {"a": 1.0}}, RUN)
    assert RULES.entry("wga").build({"alpha": 0.3}, RUN) == WeightedAveraging(0.3)
    assert RULES.entry("stream").build({}, RUN).horizon == 60
    with pytest.raises(KnobError, match="'wga' takes no `beta`; it takes alpha, tau, aggregator"):
        RULES.entry("wga").build({"beta": 0.1}, RUN)
    with pytest.raises(KnobError, match="'alone' takes no `beta`; it takes no knobs"):
        RULES.entry("alone").build({"beta": 0.1}, RUN)
    registry = new()
    registry.register("needy", WeightedAveraging)
    with pytest.raises(KnobError, match="'needy' needs `alpha`"):
        registry.entry("needy").build({}, RUN)
    half = Computed(lambda run: 0.5 * run.own_examples / run.peer_examples)
    assert registry.entry("needy").build({"alpha": half}, RUN) == WeightedAveraging(0.5 / 6)


@pytest.mark.parametrize(
    ("registry", "kind"), [(RULES, Rule), (METHODS, Method), (AGGREGATORS, object)]
)
def test_everything_built_in_is_described_and_can_be_built(
    registry: Registry[Any], kind: type
) -> None:
    for name in registry:
        entry = registry.entry(name)
        assert entry.description.endswith("."), name
        for knobs in ({}, *(entry.benchmark_settings or ())):
            built = entry.build(knobs, RUN)
            assert isinstance(built, kind) or name in {"adaptive", "mixture"}


def package(folder: Path, name: str, points: str, code: str = "") -> None:
    """Write a package as pip installs it: a module and its metadata."""
    (folder / f"{name}.py").write_text(code, encoding="utf-8")
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8"
    )
    (about / "entry_points.txt").write_text(points, encoding="utf-8")


def test_other_packages_add_theirs_by_entry_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = 'def theirs():\n    "Come from elsewhere."\n'
    package(tmp_path, "friendly", "[example.things]\ntheirs = friendly:theirs\n", code)
    package(
        tmp_path,
        "broken",
        "[example.things]\nbad = broken:absent\nmine = broken:mine\n",
        "mine = 1\n",
    )
    monkeypatch.syspath_prepend(tmp_path)
    registry = new("example.things")
    registry.register("mine", dict)
    assert registry["mine"] is dict
    assert "friendly" not in sys.modules  # nothing is loaded while what is asked for is there
    with pytest.warns(UserWarning, match="cannot be used") as told:
        assert set(registry) == {"mine", "theirs"}
    assert sorted(str(warning.message).partition(",")[0] for warning in told) == [
        "the package 'broken' offers the thing 'bad'",
        "the package 'broken' offers the thing 'mine'",
    ]
    assert registry.entry("theirs").description == "Come from elsewhere."
    assert registry["mine"] is dict


def test_a_users_own_file_or_module_is_imported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    for name in ("own_file", "own_module"):
        code = f"with open({str(log)!r}, 'a') as log:\n    log.write('{name} ')\n"
        (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv(IMPORTS, os.pathsep.join(["own_file.py", "own_module"]))
    import_from_environment()
    import_from_environment()
    assert log.read_text() == "own_file own_module "


def test_what_cannot_be_imported_is_told(tmp_path: Path) -> None:
    with pytest.raises(KnobError, match=r"names 'nothing.py', which is not there"):
        import_user_code("nothing.py")
    with pytest.raises(
        KnobError, match=r"names the module 'no_such.module', which cannot be found"
    ):
        import_user_code("no_such.module")
    (tmp_path / "lacking.py").write_text("import no_such_package\n", encoding="utf-8")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        import_user_code(str(tmp_path / "lacking.py"))
    for text, words in (
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def", "SyntaxError: .* line 1"),
    ):
        (tmp_path / "broken.py").write_text(text, encoding="utf-8")
        for _ in range(2):  # the half that was imported is not taken for the whole
            with pytest.raises(UserCodeError, match=f"`--import` of .*broken.py' raised {words}"):
                import_user_code(str(tmp_path / "broken.py"))


def documented(page: str, head: str) -> dict[str, str]:
    """Return what a table of the docs calls by each registered name."""
    text = (Path(__file__).parent.parent / "docs" / page).read_text(encoding="utf-8")
    table = text[text.index(f"| {head} | name |") :].partition("\n\n")[0]
    return {
        name: thing
        for thing, name in re.findall(r"^\| `([^`]+)`[^|]*\| `([^`]+)` \|", table, re.MULTILINE)
    }


def test_the_docs_know_every_method_and_aggregator() -> None:
    methods = documented("methods.md", "method")
    assert set(METHODS) <= set(methods) <= {*METHODS, *RULES}
    for name in METHODS:
        assert methods[name].startswith(METHODS[name].__name__)
    assert documented("aggregators.md", "aggregator") == {
        name: AGGREGATORS[name].__name__ for name in AGGREGATORS
    }


@pytest.mark.parametrize("name", [3, "", "two words", "a,b", "line\n"])
def test_a_name_that_could_not_be_written_in_a_list_is_refused(name: Any) -> None:
    shapes: Registry[object] = Registry("shape", "example.shapes")
    with pytest.raises(
        KnobError, match="the name of a shape must be a text without blanks and commas, got"
    ):
        shapes.register(name, object())
