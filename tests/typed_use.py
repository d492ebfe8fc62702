"""A user's program for the type checker alone: the public names carry complete types.

`make lint` checks it with `mypy --strict`; nothing runs it.
"""

from pathlib import Path

from typing_extensions import assert_type

from turbospark import (
    ArchConfig,
    ExpertResidency,
    Finished,
    GenerationOptions,
    GenerationResult,
    OpenOptions,
    PhaseCounters,
    Prefill,
    Runner,
    RuntimeToggles,
    Tail,
    Token,
    TurbosparkError,
    convert,
    pull,
    synth,
    watch,
)


def ask(model: Path, question: str, expected: ArchConfig | None = None) -> str:
    options = OpenOptions(
        max_context=2048,
        prefix_reuse=True,
        expert_residency=ExpertResidency.AUTO,
        expecting=expected,
        toggles=RuntimeToggles(prefill_steel=False),
    )
    with Runner.open(model, options.replace(session_slots=2), progress=True) as runner:
        chat = [{"role": "user", "content": question}]
        result = runner.generate(chat, temperature=0)
        for event in runner.stream(question, GenerationOptions(max_new_tokens=3)):
            if isinstance(event, Prefill):
                assert_type(event.done, int)
            elif isinstance(event, (Token, Tail)):
                assert_type(event.delta, str)
            elif isinstance(event, Finished):
                assert_type(event.result, GenerationResult)
        assert_type(runner.memory.planned, int)
        assert_type(runner.phase_counters - result.phases, PhaseCounters)
        assert_type(watch(runner, question), GenerationResult)
    assert_type(result.decode_tokens_per_second, float | None)
    return result.text or ""


def install(source: str) -> list[Path]:
    try:
        return [convert(source, "a.gturbo", bits=4), pull("o/r"), synth("llama", "b.gturbo")]
    except TurbosparkError as error:
        raise SystemExit(str(error)) from None
