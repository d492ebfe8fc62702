"""A mixture of experts that keeps only some of its experts in memory.

    python examples/experts.py

The model is synthetic (random weights), so the answers mean nothing; that they are the same for
every number of slots, and what the cache hits, is the point.
"""

import tempfile
from pathlib import Path

from turbospark import OpenOptions, Runner, synth

PROMPT = list(range(1, 33))

with tempfile.TemporaryDirectory() as folder:
    install = synth("qwen3_moe", Path(folder, "moe.gturbo"), experts=32, bits=4, progress=False)
    answers = set()
    print("residency  slots  hits  read")
    for residency, slots in (("streamed", 4), ("streamed", 12), ("streamed", 24), ("resident", 32)):
        options = OpenOptions(expert_residency=residency, expert_cache_slots=slots, max_context=128)
        with Runner.open(install, options) as runner:
            result = runner.generate(PROMPT, temperature=0, max_new_tokens=64, ignore_eos=True)
        answers.add(tuple(result.token_ids))
        rate = result.phases.expert_hit_rate
        hits = "-" if rate is None else f"{rate:.0%}"
        read = result.phases.expert_io_bytes_requested / 2**20
        print(f"{residency:<9}  {slots:>5}  {hits:>4}  {read:.1f} MiB")
    print(f"different answers: {len(answers)}")
