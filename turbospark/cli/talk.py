"""Commands that generate: one answer, or a conversation.

Knows prompts as people give them, and how an answer is shown. Does not know how it is made.
"""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from turbospark import GenerationOptions, GenerationResult, OpenOptions, Runner
from turbospark.cli.console import emit, flags, interruptible, note, rate, show, think
from turbospark.cli.parser import opening, sampling
from turbospark.errors import (
    ContextOverflowError,
    EmptyPromptError,
    OptionError,
    TurbosparkError,
)
from turbospark.generation import Finished, Tail, Token, with_progress
from turbospark.text.turns import Content, Reasoning, ReleasedToolSpan

CANCELLED = 130
COMMANDS = "/reset starts again, /quit or Ctrl-D ends, Ctrl-C stops an answer"
_COMMAND = re.compile(r"/\w+$")  # a path is no command


def run(args: Namespace) -> int:
    """turbospark run MODEL PROMPT"""
    options = _generation(args)
    prompt = _prompt(args)
    with _open(args) as runner:
        answer = _answer(args, runner, prompt, options)
        result = answer.result
        if args.json:
            show(args, _report(runner, answer), "")
        elif not args.quiet:
            note(_figures(result))
    return CANCELLED if result.stop_reason == "cancelled" else 0


def chat(args: Namespace) -> int:
    """turbospark chat MODEL"""
    options = _generation(args)
    system = _system(args)
    with _open(args, prefix_reuse=True) as runner:
        # A model that cannot chat says so now, and not after the first line was typed.
        hello = [*system, {"role": "user", "content": "hello"}]
        runner.encode(hello, reasoning=args.reasoning)
        messages = list(system)
        for line in _lines(f"{runner.path.name}: {COMMANDS}"):
            command = _COMMAND.match(line.split()[0]) if line else None
            if line == "/quit":
                break
            if line == "/reset":
                runner.reset()
                messages = list(system)
            elif line == "/help":
                note(COMMANDS)
            elif command:
                note(f"turbospark: unknown command {command[0]}; works: {COMMANDS}")
            elif line:
                _turn(args, runner, messages, line, options)
    return 0


def _turn(
    args: Namespace,
    runner: Runner,
    messages: list[dict[str, Any]],
    text: str,
    options: GenerationOptions,
) -> None:
    """One question and its answer; both join `messages`. At a terminal a refusal is only shown."""
    asked = [*messages, {"role": "user", "content": text}]
    try:
        answer = _answer(args, runner, asked, options)
    except TurbosparkError as error:
        if not sys.stdin.isatty():
            raise
        hint = "; /reset starts again" if isinstance(error, ContextOverflowError) else ""
        note(f"turbospark: {flags(str(error), args.typed)}{hint}")
        return
    messages[:] = [*asked, {"role": "assistant", "content": answer.content}]
    if args.json:
        print(json.dumps(_report(runner, answer), default=str), flush=True)
    elif not args.quiet and sys.stdin.isatty():
        note(_figures(answer.result))


def _lines(greeting: str) -> Iterator[str]:
    """What the person types, line by line; a prompt is shown at a terminal only."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin)
        return
    import readline  # noqa: F401 (gives `input` editing and history)

    note(greeting)
    while True:
        try:
            yield input("> ").strip()
        except KeyboardInterrupt:  # the line is given up, the conversation is not
            note("\n/quit or Ctrl-D ends")
        except EOFError:
            print()
            return


# --- the prompt -----------------------------------------------------------------------------------


def _prompt(args: Namespace) -> str | list[int] | list[dict[str, Any]]:
    """The one prompt that was given, in the form that says how it is meant."""
    modes = {
        "PROMPT": args.prompt is not None,
        "--ids": args.ids is not None,
        "--messages-file": args.messages_file is not None,
    }
    chosen = [name for name, given in modes.items() if given]
    if len(chosen) > 1:
        raise OptionError(f"{' and '.join(chosen)} were both given; a run has one prompt")
    chatting = args.ids is None and not args.raw
    only_chats = {
        "--system": args.system,
        "--reasoning": args.reasoning != "off",
        "--chat-date": hasattr(args, "chat_date"),
    }
    for name, value in only_chats.items():
        if value and not chatting:
            raise OptionError(f"{name} needs a chat, but the prompt is raw text or token ids")
    if args.raw and chosen and chosen != ["PROMPT"]:
        raise OptionError(f"--raw continues a text, but {chosen[0]} was given")
    if args.ids is not None:
        return args.ids
    if args.messages_file is not None:
        return [*_system(args), *_messages(Path(args.messages_file))]
    text = _read() if args.prompt in (None, "-") else args.prompt
    return text if args.raw else [*_system(args), {"role": "user", "content": text}]


def _read() -> str:
    if sys.stdin.isatty():
        note("reading the prompt; end it with Ctrl-D")
    text = sys.stdin.read()
    if not text.strip():
        raise EmptyPromptError(
            "standard input is empty; give the prompt as an argument or pipe a text in"
        )
    return text


def _system(args: Namespace) -> list[dict[str, Any]]:
    return [{"role": "system", "content": text} for text in args.system]


def _messages(path: Path) -> list[dict[str, Any]]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise OptionError(f"{path}: not JSON ({error})") from None
    if not isinstance(found, list) or not all(isinstance(m, dict) for m in found):
        raise OptionError(f"{path}: expected a list of messages with 'role' and 'content'")
    return found


# --- the answer -----------------------------------------------------------------------------------


def _open(args: Namespace, **changes: Any) -> Runner:
    options = OpenOptions.interactive(**opening(args), **changes)
    runner = Runner.open(args.model, options, progress=_watched(args))
    if runner.resolved.draft_note and args.speculative == "auto":
        note(f"turbospark: nothing is drafted: {flags(runner.resolved.draft_note, args.typed)}")
    if runner.steering_line and not args.quiet:
        note(f"steering {runner.steering_line}")
    return runner


def _watched(args: Namespace) -> bool:
    """Whether somebody sees progress bars."""
    return sys.stderr.isatty() and not args.quiet and not args.json


def _generation(args: Namespace) -> GenerationOptions:
    return GenerationOptions(**sampling(args))


class _Answer:
    """One answer as it comes: what was said goes to standard output, thoughts to standard error."""

    def __init__(self, args: Namespace, spelled: bool) -> None:
        self._shown = not args.json
        self._thoughts_shown = self._shown and not args.quiet
        self._spelled = spelled
        self.content = self.reasoning = ""
        self.result: Any = None

    def take(self, event: Any) -> None:
        """Show an event, and keep it."""
        if isinstance(event, Finished):
            self.result = event.result
            if self.reasoning and not self.content:
                self._end_thoughts()
        elif isinstance(event, Reasoning):
            self.reasoning += event.text
            if self._thoughts_shown:
                think(event.text)
        elif isinstance(event, Token) and not self._spelled:
            self._say(f"{event.id} ")
        elif isinstance(event, (Content, ReleasedToolSpan)):
            self._say(event.text)
        elif isinstance(event, (Token, Tail)):
            self._say(event.delta)

    def _say(self, text: str) -> None:
        if text and self.reasoning and not self.content:
            self._end_thoughts()
        self.content += text
        if self._shown:
            emit(text)

    def _end_thoughts(self) -> None:
        if self._thoughts_shown:
            think("\n\n")


def _answer(args: Namespace, runner: Runner, prompt: Any, options: GenerationOptions) -> _Answer:
    """Generate, showing the answer as it comes; Ctrl-C ends it early."""
    answer = _Answer(args, runner.tokenizer is not None)
    with interruptible() as cancel:
        events = _events(args, runner, prompt, options, cancel)
        for event in with_progress(events) if _watched(args) else events:
            answer.take(event)
    if not args.json:
        print()
    if answer.reasoning and not answer.content and answer.result.stop_reason != "cancelled":
        note("turbospark: warning: the model thought and gave no answer; raise --max-new")
    return answer


def _events(
    args: Namespace,
    runner: Runner,
    prompt: Any,
    options: GenerationOptions,
    cancel: Callable[[], bool],
) -> Iterator[Any]:
    """Events of an answer. Without --max-new it takes the room that there is."""

    def start(options: GenerationOptions) -> Iterator[Any]:
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            return runner.chat(prompt, options, reasoning=args.reasoning, cancel=cancel)
        return runner.stream(prompt, options, cancel=cancel)

    try:
        return start(options)
    except ContextOverflowError:
        if hasattr(args, "max_new_tokens"):
            raise
        return start(options.replace(max_new_tokens=None))


def _figures(result: GenerationResult) -> str:
    reused = result.reused_prefix_tokens
    fed = f"{result.prompt_tokens} tokens" + (f" ({reused} reused)" if reused else "")
    return (
        f"prompt {fed} in {result.prefill_seconds:.2f} s "
        f"({rate(result.prefill_tokens_per_second)}); answer {result.new_tokens} tokens at "
        f"{rate(result.decode_tokens_per_second)}; stopped: {result.stop_reason}"
        + (f"; drafting: {result.speculation}" if result.speculation else "")
    )


def _report(runner: Runner, answer: _Answer) -> dict[str, Any]:
    """Everything about one generation."""
    result: GenerationResult = answer.result
    said = {} if result.text is None else {"content": answer.content}
    fields = {name: value for name, value in vars(result).items() if name != "phases"}
    return {
        "model": runner.path,
        **said,
        "reasoning": answer.reasoning or None,
        **fields,
        "new_tokens": result.new_tokens,
        "prefill_tokens_per_second": result.prefill_tokens_per_second,
        "decode_tokens_per_second": result.decode_tokens_per_second,
        "phases": result.phases.as_dict(),
        "speculation": result.speculation and result.speculation.as_dict(),
        "resolved": runner.resolved.as_dict(),
        "memory": asdict(runner.memory),
    }
