"""From an experiment to what an engine runs: what is refused before any work starts."""

from __future__ import annotations

from typing import Any

import pytest

from command_line import SMALL
from gossamer import Algorithm, BadInput, Experiment, Node
from gossamer.engines.setup import prepare


class NoAlgorithm:
    """Something else."""


class NotAsync(Algorithm):
    def run(self, node: Node) -> Any:
        return None


@pytest.mark.parametrize(
    ("found", "said"), [(NoAlgorithm, "no subclass of gossamer.Algorithm"), (NotAsync, "run() is not async")]
)
def test_what_is_no_algorithm_is_refused(found: type, said: str) -> None:
    name = f"{found.__module__}:{found.__qualname__}"
    with pytest.raises(
        BadInput, match="accepted: a subclass of gossamer.Algorithm with async def run"
    ) as caught:
        prepare(Experiment.parse(SMALL, [f"algorithm={{name: '{name}'}}"]))
    assert str(caught.value).startswith(f"algorithm: '{name}': {said}")
