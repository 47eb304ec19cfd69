from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gossamer.errors import BadInput, Deadlock, GossamerError, RunFailed, cause, listed, suggest


def test_bad_input_has_one_line_per_problem() -> None:
    error = BadInput("nodes: 0; accepted: 1 or more", "seed: -1; accepted: 0 or more")
    assert error.problems == ("nodes: 0; accepted: 1 or more", "seed: -1; accepted: 0 or more")
    assert str(error).splitlines() == list(error.problems)


def test_run_failed_carries_node_round_and_traceback() -> None:
    error = RunFailed("node 3 failed", node=3, round=7, traceback="Traceback ...")
    assert (str(error), error.node, error.round, error.traceback) == ("node 3 failed", 3, 7, "Traceback ...")
    assert error.folder is None
    assert RunFailed("cause").node is None


def caught(call: Callable[[], object]) -> BaseException:
    with pytest.raises((RuntimeError, ValueError, TypeError)) as error:
        call()
    return error.value


def test_cause_names_the_users_line() -> None:
    here = Path(__file__).name
    for call in (lambda: torch.zeros(2) @ torch.zeros(3), lambda: json.loads("{"), lambda: listed(None)):  # type: ignore[arg-type]
        assert cause(caught(call)).endswith(f" ({here}, line {call.__code__.co_firstlineno})")


def test_cause_without_user_code_names_last_line() -> None:
    error = caught(lambda: json.loads("{"))
    assert error.__traceback__ is not None
    library = error.with_traceback(error.__traceback__.tb_next.tb_next)  # type: ignore[union-attr]
    assert re.search(r" \((decoder|__init__)\.py, line \d+\)$", cause(library))
    assert cause(ValueError("two\nlines")) == "ValueError: two lines"
    assert cause(ValueError("words " * 1000)) == f"ValueError: {('words ' * 1000)[:1999]}…"


def test_all_errors_derive_from_gossamer_error() -> None:
    for kind in (BadInput, RunFailed, Deadlock):
        assert issubclass(kind, GossamerError)
    assert issubclass(Deadlock, RunFailed)
    assert not issubclass(BadInput, RunFailed)


@pytest.mark.parametrize(
    ("wrong", "suggestion"),
    [("rign", " (did you mean 'ring'?)"), ("complet", " (did you mean 'complete'?)"), ("zzz", ""), ("", "")],
)
def test_the_nearest_accepted_name_is_suggested(wrong: str, suggestion: str) -> None:
    assert suggest(wrong, ["ring", "star", "complete"]) == suggestion


def test_no_suggestion_without_accepted_names() -> None:
    assert suggest("ring", []) == ""


def test_names_are_listed_in_order() -> None:
    assert listed(["star", "complete", "ring"]) == "complete, ring, star"
    assert listed([]) == ""
