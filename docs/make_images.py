"""Screenshots of the notebook displays, as docs/images holds them.

    python docs/make_images.py [MODEL]

needs Chromium and the extra `notebook`. MODEL is that of `make demo`; experts, packed caches and
steering are those of a synthetic model.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from turbospark import DraftPolicies, Runner, SteeringPolicy, SteeringSet, kv, synth

IMAGES = Path(__file__).parent / "images"
MODEL = sys.argv[1] if len(sys.argv) > 1 else ".demo/SmolLM2-135M-Instruct.gturbo"
COPY = "Copy this list:\nHamburg, Elbe, 1189\nBremen, Weser, 787\nPorto, Douro, 1123"
PAGE = """<!doctype html><meta charset="utf-8"><style>
body { margin: 12px; width: 660px; background: #fff; color: #1f2328;
       font: 14px/1.4 "DejaVu Sans", sans-serif }
</style>"""


def answers() -> dict[str, str]:
    """Displays of a real model: the runner, an answer, its phases and its speculation."""
    options = {"max_context": 512, "speculation": DraftPolicies(prompt_lookup=4)}
    with Runner.open(MODEL, **options) as runner:
        said = [{"role": "user", "content": COPY}]
        answer = runner.generate(said, temperature=0, max_new_tokens=32)
        return {
            "runner": runner._repr_html_(),
            "result": answer._repr_html_(),
            "phases": answer.phases._repr_html_(),
            "speculation": answer.speculation._repr_html_(),
        }


def experts(folder: Path) -> dict[str, str]:
    """Displays of a mixture of streamed experts, its packed caches, and a policy to steer it."""
    shape = {"layers": 6, "heads": 4, "kv_heads": 2, "head_dim": 64, "hidden": 256, "experts": 32}
    install = synth("qwen3_moe", folder / "moe.gturbo", router_skew=0.75, progress=False, **shape)
    directions = np.random.default_rng(5).normal(size=(5, 256)).cumsum(0) / 10
    kept = SteeringSet.of(dict(enumerate(directions, 1)))
    policy = SteeringPolicy.single(kept, "add", 0.5)
    with Runner.open(install, max_context=4096, kv_quant=4, expert_cache_slots=8) as runner:
        runner.generate(list(range(1, 200)), max_new_tokens=16, ignore_eos=True)
        return {
            "experts": runner._repr_html_(),
            "kv": kv.report(runner)._repr_html_(),
            "steering": policy._repr_html_(),
        }


def photograph(browser: str, name: str, html: str, folder: Path) -> None:
    """Write IMAGES/name.png, cut to what it shows, in few colours to keep it small."""
    page, shot = folder / "page.html", folder / "page.png"
    page.write_text(PAGE + html)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    window = ["--window-size=684,900", f"--screenshot={shot}"]
    subprocess.run([browser, *flags, *window, page.as_uri()], check=True, capture_output=True)
    picture = Image.open(shot).convert("RGB")
    drawn = np.flatnonzero((np.asarray(picture) < 255).any(axis=(1, 2)))
    kept = picture.crop((0, 0, picture.width, int(drawn[-1]) + 13))
    kept.quantize(64).save(IMAGES / f"{name}.png", optimize=True)


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        raise SystemExit("the pictures need chromium, and there is none on the PATH")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for title, html in {**answers(), **experts(folder)}.items():
            photograph(browser, title, html, folder)


if __name__ == "__main__":
    main()
