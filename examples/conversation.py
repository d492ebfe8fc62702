"""A conversation whose second turn does not read the first one again.

    python examples/conversation.py [MODEL]

With `prefix_reuse` the cache keeps what two prompts share; the result says how much that was.
"""

import sys

from turbospark import GenerationOptions, OpenOptions, Runner

MODEL = sys.argv[1] if len(sys.argv) > 1 else ".demo/SmolLM2-135M-Instruct.gturbo"
QUESTIONS = ("Name three rivers of Europe.", "Which of them is the longest?", "And the shortest?")
OPTIONS = GenerationOptions(temperature=0.7, seed=11, max_new_tokens=60)

with Runner.open(MODEL, OpenOptions(prefix_reuse=True)) as runner:
    messages = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer = runner.generate(messages, OPTIONS)
        messages.append({"role": "assistant", "content": answer.text})
        print(f"> {question}\n{answer.text}")
        print(
            f"  ({answer.prompt_tokens} tokens of prompt, {answer.reused_prefix_tokens} reused, "
            f"first token after {answer.prefill_seconds:.2f} s)\n"
        )
