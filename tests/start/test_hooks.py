"""Functions that installed packages register, and a run calls."""

from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest

from titanlike.config import UserError
from titanlike.run import hooks


def greet(name: str) -> str | None:
    return f"hello {name}" if name else None


def refuse(name: str) -> str:
    raise UserError(f"no {name}")


def register(monkeypatch: pytest.MonkeyPatch, *functions: str) -> None:
    found = EntryPoints(EntryPoint(each, f"{__name__}:{each}", "titanlike.point") for each in functions)
    monkeypatch.setattr(hooks, "entry_points", lambda group: found.select(group=group))


def test_the_texts_of_all_functions_are_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "greet")
    assert hooks.call_hooks("point", name="you") == ["hello you"]
    assert hooks.call_hooks("point", name="") == []


@pytest.mark.parametrize(("arguments", "text"), [
    (dict(name="plan"), "refuse: UserError: no plan"),
    (dict(other="plan"), "refuse: TypeError: refuse() got an unexpected keyword argument 'other'"),
])  # fmt: skip
def test_a_function_that_fails_is_reported_in_the_place_of_its_text(
    arguments: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, "refuse")
    assert hooks.call_hooks("point", **arguments) == [text]


def test_a_function_may_refuse_an_argument_where_nothing_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "refuse")
    with pytest.raises(UserError, match="no plan"):
        hooks.call_hooks("point", may_refuse=True, name="plan")


def test_a_clone_that_is_not_installed_has_the_functions_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from titanlike.tools.data import hooks as data
    from titanlike.tools.planning import hooks as planner

    register(monkeypatch)
    assert [entry.load() for entry in hooks.registered("titanlike.checked")] == [data.checked, planner.checked]
    monkeypatch.setattr(hooks, "REPOSITORY", hooks.REPOSITORY / "titanlike")  # a folder without a pyproject.toml
    assert hooks.registered("titanlike.checked") == []
