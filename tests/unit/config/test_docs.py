"""The committed page is the generated one, and the room stays light."""

import subprocess
import sys
from pathlib import Path

from tithe.config.docs import render
from tithe.config.fields import iter_fields

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_the_committed_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == render(), "run: python -m tithe.config.docs > docs/configuration.md"


def test_every_key_has_its_entry_and_nothing_depends_on_the_machine():
    page = render()
    assert all(f"**`{key}`**" in page for key, _ in iter_fields())
    assert str(Path.cwd()) not in page
    assert "PydanticUndefined" not in page


def test_the_configuration_needs_no_torch_and_no_model_library():
    code = (
        "import sys, tithe.config as c; c.dump_resolved(c.load_config(None));"
        "print([m for m in ('torch', 'transformers', 'numpy', 'numba') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
