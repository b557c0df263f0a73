"""SciPy is asked for when a selector that uses it is made, and named where it is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fedentopt.errors import InputError
from fedentopt.selection import SELECTORS

USE_SCIPY = ("hics-fl", "clustered-update", "clustered-label", "flips")


def test_without_scipy_those_that_need_it_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "scipy"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("scipy", "scipy.cluster", "scipy.cluster.hierarchy", "scipy.cluster.vq"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in SELECTORS.names:
        if name in USE_SCIPY:
            with pytest.raises(InputError) as caught:
                SELECTORS.get(name)(2)
            assert str(caught.value) == (
                f"selector: '{name}' needs SciPy, which is not installed; accepted: pip install 'fedentopt[selectors]'"
            )
        else:
            selector = SELECTORS.get(name)(2)
            selector.register([[1, 2], [3, 4], [5, 6]])
            assert len(selector.select().clients) <= 2


def test_nothing_else_imports_scipy() -> None:
    code = (
        "import sys\n"
        "from fedentopt.selection import SELECTORS\n"
        f"made = [SELECTORS.get(n)(2) for n in SELECTORS.names if n not in {USE_SCIPY}]\n"
        "for one in made:\n"
        "    one.register([[1, 2], [3, 4], [5, 6]])\n"
        "    one.select()\n"
        "assert len(made) > 8\n"
        "heavy = {name.partition('.')[0] for name in sys.modules} & {'scipy', 'torch', 'sklearn'}\n"
        "print(sorted(heavy))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
