"""Many clients at once against the server: nothing lost, nothing mixed up, and how fast.

    python benchmarks/server_load.py INSTALL [--clients 16] [--seconds 60] [--topics 4] [--write]

needs `turbospark[server]` and openai. Serves INSTALL in this process; each client is a thread with
an official `openai` client that holds short conversations of its own: greedy, half of them
streamed, every seventh stream left after two chunks. Each whole answer is compared with what the
library gives for the same messages; every request must be answered, or be refused with 429 and come
again. `--topics`: conversations of a client, of which a slow model takes minutes to prepare many.
`--write` records the figures under benchmarks/results/, in a file named after the model.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import openai
import uvicorn

from turbospark import Runner
from turbospark.server.app import make_app

ROOT = Path(__file__).resolve().parents[1]
TOKENS = 8
TURNS = 3
TOPICS = ("rivers", "stars", "bread", "chess")
MODEL = "model"


@contextmanager
def serving(runner: Runner, **settings: Any) -> Iterator[str]:
    """The base URL of a server on a free port."""
    config = uvicorn.Config(make_app(runner, MODEL, **settings), port=0, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join()


def question(client: int, topic: str, turn: int) -> dict[str, str]:
    return {"role": "user", "content": f"Client {client} asks about {topic}, part {turn}."}


def expected(runner: Runner, clients: int, topics: int) -> dict[str, str]:
    """The messages of every turn of every conversation, as JSON -> the library's own answer."""
    answers: dict[str, str] = {}
    for client in range(clients):
        for topic in TOPICS[:topics]:
            messages: list[dict[str, str]] = []
            for turn in range(TURNS):
                messages.append(question(client, topic, turn))
                found = runner.generate(messages, temperature=0, max_new_tokens=TOKENS).text or ""
                answers[json.dumps(messages)] = found
                messages.append({"role": "assistant", "content": found})
    return answers


class Client(threading.Thread):
    """Talks until `until`; what happened is counted in `seen`."""

    def __init__(
        self, number: int, url: str, until: float, answers: dict[str, str], topics: int
    ) -> None:
        super().__init__()
        self.topics = TOPICS[:topics]
        self.number, self.until, self.answers = number, until, answers
        self.api = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)
        self.random = random.Random(number)
        self.seen: Counter[str] = Counter()
        self.seconds: list[float] = []

    def run(self) -> None:
        first = True
        while first or time.monotonic() < self.until:
            first = False
            topic, messages = self.random.choice(self.topics), []
            for turn in range(TURNS):
                messages.append(question(self.number, topic, turn))
                answer = self.answers[json.dumps(messages)]
                self.ask(messages, answer)
                messages.append({"role": "assistant", "content": answer})

    def ask(self, messages: list[Any], answer: str) -> None:
        while True:
            self.seen["sent"] += 1
            try:
                found = self.answered(messages)
                break
            except openai.RateLimitError:
                self.seen["refused"] += 1
                time.sleep(0.05)
        if found is not None:
            self.seen["right" if found == answer else "wrong"] += 1

    def answered(self, messages: list[Any]) -> str | None:
        """The answer; None for a stream that was left."""
        settings: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS}
        asked = {"model": MODEL, "messages": messages, **settings}
        start = time.perf_counter()
        if self.random.random() < 0.5:
            whole = self.api.chat.completions.create(**asked)
            self.seconds.append(time.perf_counter() - start)
            return whole.choices[0].message.content or ""
        leave = self.random.randrange(7) == 0
        pieces: list[str] = []
        with self.api.chat.completions.create(**asked, stream=True) as stream:
            for count, chunk in enumerate(stream):
                pieces.append(chunk.choices[0].delta.content or "")
                if leave and count == 1:
                    self.seen["left"] += 1
                    return None
        self.seconds.append(time.perf_counter() - start)
        return "".join(pieces)


def load(
    runner: Runner, clients: int, seconds: float, queue_limit: int, topics: int = len(TOPICS)
) -> dict[str, Any]:
    """Run the clients -> counts and latencies."""
    answers = expected(runner, clients, topics)
    before = runner.phase_counters.calls
    with serving(runner, queue_limit=queue_limit) as url:
        start = time.monotonic()
        crowd = [Client(n, url, start + seconds, answers, topics) for n in range(clients)]
        for client in crowd:
            client.start()
        for client in crowd:
            client.join()
        took = time.monotonic() - start
    seen = sum((client.seen for client in crowd), Counter())
    latencies = sorted(s for client in crowd for s in client.seconds)
    return {
        "clients": clients,
        "seconds": round(took, 1),
        **{name: seen[name] for name in ("sent", "right", "wrong", "refused", "left")},
        "lost": seen["sent"] - seen["right"] - seen["wrong"] - seen["refused"] - seen["left"],
        "fewest_answers_of_a_client": min(client.seen["right"] for client in crowd),
        "answers_per_second": round(seen["right"] / took, 1),
        "latency_median_s": round(statistics.median(latencies), 3),
        "latency_p99_s": round(latencies[int(len(latencies) * 0.99)], 3),
        "tokens_fed": runner.phase_counters.calls - before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("install")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--queue", type=int, default=12)
    parser.add_argument("--topics", type=int, default=len(TOPICS))
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    with Runner.open(args.install, max_context=512, prefix_reuse=True, session_slots=4) as runner:
        found = load(runner, args.clients, args.seconds, args.queue, args.topics)
    command = f"python benchmarks/server_load.py {Path(args.install).name} --clients {args.clients}"
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    report = {
        "command": f"{command} --seconds {args.seconds:g} --queue {args.queue} "
        f"--topics {args.topics}",
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "versions": {n: version(n) for n in ("mlx", "starlette", "uvicorn", "openai")},
        "commit": commit.stdout.strip(),
        **found,
    }
    print(json.dumps(report, indent=1))
    if args.write:
        path = ROOT / "benchmarks" / "results" / f"server_load-{Path(args.install).stem}.json"
        path.write_text(json.dumps(report, indent=1) + "\n")
    if found["wrong"] or found["lost"]:
        raise SystemExit("answers were wrong or lost")


if __name__ == "__main__":
    main()
