"""A direction made from contrast prompts, saved as a control vector, and applied.

    python examples/steering.py [MODEL]

Prints how much of the direction each block carries, then the answer at several strengths.
"""

import sys
import tempfile
from pathlib import Path

from turbospark import ControlVectorInfo, OpenOptions, Runner, SteeringPolicy, SteeringSet
from turbospark.steering import extract

MODEL = sys.argv[1] if len(sys.argv) > 1 else ".demo/SmolLM2-135M-Instruct.gturbo"
SAY = "Describe {}. Speak as an extremely {} person."
THINGS = ("your day", "the weather", "a walk in the park", "your breakfast")
QUESTION = [{"role": "user", "content": "How was your day?"}]


def chats(mood: str) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": SAY.format(thing, mood)}] for thing in THINGS]


with Runner.open(MODEL, OpenOptions(max_context=1024)) as runner:
    made = extract(runner, chats("joyful"), chats("miserable"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "joy.gguf")
        made.save(path)
        print(ControlVectorInfo(path))
        joy = SteeringSet.load(path)

    # Strength 0 changes nothing and measures.
    runner.set_steering(SteeringPolicy.single(joy, "add", 0))
    runner.prefill(runner.encode(chats("joyful")[0]))
    for block, (carried,) in enumerate(runner.steering_coefficients or []):
        if carried is not None:
            print(f"block {block:2}  {carried:8.2f}")

    half = runner.arch.num_layers // 2
    middle = joy.restrict(half - 1, half + 1)  # what is added at several blocks adds up
    for strength in (0, 1, 2):
        runner.set_steering(SteeringPolicy.single(middle, "add", strength))
        answer = runner.generate(QUESTION, temperature=0, max_new_tokens=48)
        print(f"\n[{runner.steering_line}]\n{answer.text}")
