"""The public names exist and are documented."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil

import pytest

import gossamer


@pytest.mark.parametrize("name", gossamer.__all__)
def test_public_names_are_importable(name: str) -> None:
    assert getattr(gossamer, name).__doc__, f"gossamer.{name} has no docstring"


def test_dir_lists_all_public_names() -> None:
    assert set(gossamer.__all__) <= set(dir(gossamer))


def test_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Algoritm'"):
        _ = gossamer.Algoritm  # type: ignore[attr-defined]


def test_every_module_imports_and_has_a_docstring() -> None:
    for module in pkgutil.walk_packages(gossamer.__path__, "gossamer."):
        if module.name == "gossamer.__main__":
            continue
        if module.name == "gossamer.learning.mixing_gpu" and importlib.util.find_spec("triton") is None:
            continue  # it comes with torch for GPUs
        assert importlib.import_module(module.name).__doc__, f"{module.name} has no docstring"
