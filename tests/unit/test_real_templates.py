"""Opt-in: chat templates of real models, byte for byte as transformers renders them.

TURBOSPARK_REAL_TEMPLATES names a folder that tests/data/make_chat_references.py has recorded.
"""

from __future__ import annotations

import json
import os
import runpy
import warnings
from pathlib import Path

import pytest

from turbospark.errors import OptionError, UnsupportedError
from turbospark.text.template import ChatTemplate

FOLDER = os.environ.get("TURBOSPARK_REAL_TEMPLATES")
MAKER = Path(__file__).parents[1] / "data" / "make_chat_references.py"

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not FOLDER, reason="TURBOSPARK_REAL_TEMPLATES is not set"),
]


def test_real_templates_render_as_transformers_does() -> None:
    made = runpy.run_path(str(MAKER), run_name="made")
    texts = made["templates"](Path(FOLDER or ""))
    recorded = json.loads((Path(FOLDER or "") / "chat_references.json").read_text("utf-8"))
    same = 0
    for key, expected in recorded.items():
        name, case, reasoning = key.split("|")
        messages, tools = made["CASES"][case]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # levels that a template ignores
            try:
                found = ChatTemplate(texts[name], name).render(
                    messages, tools=tools, reasoning=reasoning, bos_token="<s>", eos_token="</s>"
                )
            except OptionError:
                found = None
            except UnsupportedError:  # transformers leaves them out of the prompt
                assert tools and "tools" not in texts[name].replace("tool_calls", "")
                continue
        if expected is not None:  # transformers hands `tools=None` over, which some iterate
            assert found == expected, key
            same += 1
    assert same >= 10
