"""Events of a generation as they happen, and how to stop one.

python examples/streaming.py [MODEL]
"""

import sys

from turbospark import OpenOptions, Runner
from turbospark.generation import Finished, Prefill, Tail, Token

MODEL = sys.argv[1] if len(sys.argv) > 1 else ".demo/SmolLM2-135M-Instruct.gturbo"
PROMPT = [{"role": "user", "content": "Tell me a story about a lighthouse."}]

with Runner.open(MODEL, OpenOptions(max_context=1024)) as runner:
    for event in runner.stream(PROMPT, temperature=0.8, seed=3, stop=["\n\n"], max_new_tokens=80):
        match event:
            case Prefill(done, total):
                print(f"[prompt {done}/{total}]")
            case Token(delta=text) | Tail(text=text):
                print(text, end="", flush=True)
            case Finished(result):
                print(f"\n[{result.stop_reason} after {result.new_tokens} tokens]")

    # Closing the iterator cancels: the runner is free again, and its cache is whole.
    events = runner.stream(PROMPT, max_new_tokens=500)
    for event in events:
        if isinstance(event, Token) and event.index == 4:
            events.close()
            break
    print(f"[cancelled; {runner.position} positions in the cache]")
