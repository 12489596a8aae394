"""Lightning's advice on loaders (more workers, no validation) is not for tests of training."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            advice = "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"
            item.add_marker(pytest.mark.filterwarnings(advice))
