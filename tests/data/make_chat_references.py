"""Record what transformers renders for the chat templates of a folder.

    python tests/data/make_chat_references.py FOLDER

needs transformers. FOLDER holds `*.jinja` files, or folders with a tokenizer_config.json that has a
chat_template. Writes FOLDER/chat_references.json, which tests/unit/test_real_templates.py reads
when TURBOSPARK_REAL_TEMPLATES names the folder. A case that transformers refuses is null.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a <city> & more",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "é name"},
                    "days": {"type": "integer"},
                },
                "required": ["city"],
            },
        },
    }
]
CALL = {"name": "get_weather", "arguments": {"city": "Köln <x>", "days": 2}}
HI = [{"role": "user", "content": "  hi <b>\n"}]
BRIEF = [{"role": "system", "content": "be brief"}, *HI]
LONGER = [
    *BRIEF,
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nhello"},
    {"role": "user", "content": "ünd?"},
]
CALLED = [
    *BRIEF,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "abcdefghi", "type": "function", "function": CALL}],
    },
    {"role": "tool", "name": "get_weather", "tool_call_id": "abcdefghi", "content": "rain"},
]
CASES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "hi": (HI, None),
    "system": (BRIEF, None),
    "longer": (LONGER, None),
    "tools": (BRIEF, TOOLS),
    "called": (CALLED, TOOLS),
}


def templates(folder: Path) -> dict[str, str]:
    """Name -> template text."""
    found = {path.stem: path.read_text("utf-8") for path in sorted(folder.glob("*.jinja"))}
    for path in sorted(folder.glob("*/tokenizer_config.json")):
        text = json.loads(path.read_text("utf-8")).get("chat_template")
        if isinstance(text, str):
            found[path.parent.name] = text
    return found


def main(folder: Path) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    recorded: dict[str, str | None] = {}
    for name, text in templates(folder).items():
        for case, (messages, tools) in CASES.items():
            for reasoning in ("off", "high"):
                level = {"reasoning_effort": reasoning, "reasoning_strength": reasoning}
                try:
                    rendered, _ = render_jinja_template(
                        conversations=[messages],
                        tools=tools,
                        chat_template=text,
                        add_generation_prompt=True,
                        bos_token="<s>",
                        eos_token="</s>",
                        add_vision_id=False,
                        enable_thinking=reasoning != "off",
                        **({} if reasoning == "off" else level),
                    )
                except Exception:  # whatever a template does wrong
                    rendered = [None]
                recorded[f"{name}|{case}|{reasoning}"] = rendered[0]
    (folder / "chat_references.json").write_text(json.dumps(recorded, ensure_ascii=False))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
