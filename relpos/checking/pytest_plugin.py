"""A plugin of pytest: `pytest --relpos-check MODEL` adds a test of the positions of a model.

In a test of your own, three lines do the same:

    def test_positions():
        relpos.check(model).assert_right()
"""

from collections.abc import Sequence
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.getgroup("relpos").addoption(
        "--relpos-check",
        action="append",
        default=[],
        metavar="MODEL",
        help="also check the positions of this model: a folder, a .gguf file or a name on the hub (may be repeated)",
    )


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add one test per model."""
    models: Sequence[str] = config.getoption("relpos_check")
    items.extend(PositionItem.from_parent(session, name=f"relpos-check[{model}]", model=model) for model in models)


class PositionItem(pytest.Item):
    """A test that the positions of a model are right."""

    def __init__(self, *, model: str, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.model = model

    def runtest(self) -> None:
        from relpos.checking.check import check

        check(self.model).assert_right()

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> str:
        """The findings, without a traceback."""
        return str(excinfo.value)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.path, None, self.name
