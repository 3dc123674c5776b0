"""Fixtures and markers shared by all tests."""

import functools
import sys
from collections.abc import Iterator

import pytest

from tests.covering import split
from tests.zygote import RankRunner


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the rows beyond the covering selection as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tables of layouts are products; without --full each family, layout and pair of axes runs where it is richest."""
    if config.getoption("--full"):
        return
    items[:], beyond = split(items)
    if beyond:
        config.hook.pytest_deselected(items=beyond)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankRunner]:
    """Run a module-level function on N gloo ranks; see tests/zygote.py."""
    runner = RankRunner()
    yield runner
    runner.close()


@pytest.fixture(autouse=True)
def _no_process_group_outlives_its_test() -> Iterator[None]:
    """Close what a test leaves open in this process: Lightning never closes the group it has opened."""
    yield
    if "torch.distributed" in sys.modules and (dist := sys.modules["torch.distributed"]).is_initialized():
        dist.destroy_process_group()


@functools.cache
def _why_no_gpu() -> str | None:
    import torch

    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := _why_no_gpu()):
        pytest.skip(f"needs a GPU: {reason}")
