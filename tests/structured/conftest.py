"""A compiler of grammars over nano's vocabulary."""

from collections.abc import Iterator

import pytest

from deepinfer.structured.compiler import GrammarCompiler
from tests.structured.grammars import vocabulary


@pytest.fixture
def grammars() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(vocabulary)
    yield made
    made.close()
