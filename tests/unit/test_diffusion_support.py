"""The README's table of diffusion families is what the adapters say, and what they say is so."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from omni_async.stages.diffusion import support
from tests.tiny.folders import stock_pipeline

pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = Path(__file__).parents[2]


def test_the_readme_has_the_table_of_the_adapters() -> None:
    assert support.markdown() in (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_adapter_is_in_the_table() -> None:
    folders = {path.parent.name for path in (ROOT / "stages/models").glob("*/adapter.py")}
    assert folders == set(support.FAMILIES)


@pytest.mark.parametrize("family", support.FAMILIES)
def test_what_an_adapter_says_of_its_network_is_so(family: str) -> None:
    adapter = importlib.import_module(f"omni_async.stages.models.{family}.adapter").Adapter
    network = getattr(stock_pipeline(family), adapter.denoiser)
    assert type(network).__name__ == adapter.network
    processors = [getattr(module, "processor", None) for module in network.modules()]
    assert any(hasattr(each, "_attention_backend") for each in processors) == adapter.dispatches_attention
