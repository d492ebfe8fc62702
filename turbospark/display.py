"""How objects show themselves in a notebook: HTML, with their plain text beside it.

Knows HTML and which figures people look for first; the objects it shows are only read. What it
writes is inline and complete: no script, style sheet or picture from elsewhere, every text escaped.
Text takes the page's colour, and bars take mid-tones that stand out on light and on dark alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turbospark.counters import PhaseCounters
    from turbospark.generation import GenerationResult
    from turbospark.memory import MemoryReport
    from turbospark.runner import Runner
    from turbospark.speculation.stats import SpeculationStats
    from turbospark.steering.vectors import SteeringPolicy

PALETTE = (
    "#2f7fd1", "#c9781b", "#2a9461", "#b0559b", "#8a7bd8",
    "#d1495b", "#1f97a8", "#7d8a2e", "#8c6d5a", "#808890",
)  # fmt: skip
"""Mid-tones, at least three to one against white and against #1e1e1e."""

LINE = "rgba(128,128,128,.4)"
FAINT = "rgba(128,128,128,.18)"

PHASE_WORDS = {
    "build": "building the graph, and products on a CPU",
    "eval_wait": "waiting for a layer's router",
    "final_wait": "waiting for the logits",
    "router": "routing on the host",
    "expert_io": "reading missing experts",
    "bind": "uploading routes",
    "pipeline_wait": "waiting for routed work",
    "sampling": "choosing tokens",
    "detokenize": "spelling tokens",
    "loop": "stop checks and events",
}


class Shown:
    """What has a place in a notebook: `str()` where only text is shown, else HTML."""

    def _repr_html_(self) -> str:
        return preformatted(str(self))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self._repr_html_()}


# --- pieces ---------------------------------------------------------------------------------------


def card(title: str, note: str, *parts: str) -> str:
    """A framed box: a title, a note beside it, and parts that are HTML already."""
    head = (
        f'<div style="margin-bottom:.4em"><b>{escape(title)}</b>'
        f'<span style="opacity:.75;margin-left:.7em">{escape(note)}</span></div>'
    )
    return (
        f'<div style="border:1px solid {LINE};border-radius:6px;padding:.6em .9em;'
        f'margin:.2em 0;max-width:48em;line-height:1.45">{head}{"".join(parts)}</div>'
    )


def facts(rows: Mapping[str, Any]) -> str:
    """A name and a value per line; None and empty values are left out."""
    cells = "".join(
        f'<div style="opacity:.75">{escape(name)}</div>'
        f'<div style="overflow-wrap:anywhere">{escape(str(value))}</div>'
        for name, value in rows.items()
        if value not in (None, "")
    )
    return (
        '<div style="display:grid;grid-template-columns:max-content 1fr;gap:0 1em;'
        f'font-size:.92em">{cells}</div>'
    )


def gauge(name: str, amount: float, whole: float, words: str) -> str:
    """A bar of one neutral part, the rest empty."""
    return bar([("", 0, "")] * (len(PALETTE) - 1) + [(name, amount, words)], whole)


def bar(parts: Sequence[tuple[str, float, str]], whole: float | None = None) -> str:
    """One stacked bar of (name, amount, amount in words); a `whole` leaves the rest empty."""
    shown = [(i, *part) for i, part in enumerate(parts) if part[1] > 0]
    total = max(sum(amount for _, _, amount, _ in shown), whole or 0) or 1
    pieces = "".join(
        f'<div title="{escape(f"{name}: {words}")}" style="flex:0 1 {100 * amount / total:.3f}%;'
        f'min-width:2px;background:{PALETTE[i % len(PALETTE)]}"></div>'
        for i, name, amount, words in shown
    )
    spoken = escape(", ".join(f"{name} {words}" for _, name, _, words in shown))
    return (
        f'<div role="img" aria-label="{spoken}" style="display:flex;gap:1px;height:14px;'
        f"border-radius:3px;overflow:hidden;background:{FAINT};margin:.35em 0"
        f'">{pieces}</div>'
    )


def strip(values: Sequence[float | None], words: str) -> str:
    """A column per layer, as high as its value; the second colour is below zero, None is empty."""
    highest = max((abs(v) for v in values if v is not None), default=0) or 1
    columns = "".join(
        f'<div title="{escape(f"layer {i}: {v:.4g}")}" style="flex:1 1 0;max-width:1em;'
        f'height:{100 * abs(v) / highest:.1f}%;background:{PALETTE[v < 0]}"></div>'
        if v is not None
        else '<div style="flex:1 1 0;max-width:1em"></div>'
        for i, v in enumerate(values)
    )
    return (
        f'<div role="img" aria-label="{escape(words)}" style="display:flex;gap:1px;height:36px;'
        f'align-items:flex-end;border-bottom:1px solid {LINE};margin:.35em 0">{columns}</div>'
    )


def legend(rows: Iterable[tuple[int, Sequence[str]]]) -> str:
    """Lines of a bar's parts: (index of the colour, cells); the last cell is small print."""
    lines = []
    for index, (name, *numbers, words) in rows:
        square = (
            f'<span style="display:inline-block;width:.7em;height:.7em;border-radius:2px;'
            f'margin-right:.5em;background:{PALETTE[index % len(PALETTE)]}"></span>'
        )
        cells = "".join(
            '<td style="text-align:right;padding:0 .9em 0 0;border:0;background:none;'
            f'white-space:nowrap;font-variant-numeric:tabular-nums">{escape(number)}</td>'
            for number in numbers
        )
        lines.append(
            '<tr style="background:none"><td style="text-align:left;padding:0 .9em 0 0;border:0;'
            f'white-space:nowrap;background:none">{square}{escape(name)}</td>{cells}'
            '<td style="text-align:left;padding:0;border:0;opacity:.75;background:none">'
            f"{escape(words)}</td></tr>"
        )
    return (
        '<table style="border-collapse:collapse;border:0;margin:.2em 0;font-size:.92em;'
        f'color:inherit"><tbody>{"".join(lines)}</tbody></table>'
    )


def preformatted(text: str) -> str:
    """Plain text as it stands."""
    return f'<pre style="margin:0;color:inherit;background:none">{escape(text)}</pre>'


def quoted(text: str) -> str:
    """A text of any length, wrapped, with its line ends."""
    return (
        f'<div style="white-space:pre-wrap;overflow-wrap:anywhere;max-height:28em;overflow:auto;'
        f'border-left:3px solid {LINE};padding:.1em .8em;margin:.3em 0">{escape(text)}</div>'
    )


def size(count: float) -> str:
    """Bytes for people."""
    for unit, divisor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= divisor:
            return f"{count / divisor:.1f} {unit}"
    return f"{count:.0f} bytes"


def speed(value: float | None) -> str | None:
    """Tokens per second for people; None stays None."""
    return None if value is None else f"{value:.1f} tokens/s"


# --- objects --------------------------------------------------------------------------------------


def memory(report: MemoryReport) -> str:
    """A bar of what is planned, the formula of each part, and what MLX holds."""
    return card("Memory", f"{size(report.planned)} planned", memory_bar(report), _mlx(report))


def memory_bar(report: MemoryReport) -> str:
    """The bar alone, with its legend."""
    parts = [
        ("weights", report.weights, "resident tensors, as they are computed with"),
        ("experts", report.experts, report.expert_formula),
        ("kv", report.kv, report.kv_formula),
    ]
    rows = [(i, (n, size(c), how)) for i, (n, c, how) in enumerate(parts) if c]
    return bar([(n, c, size(c)) for n, c, _ in parts]) + legend(rows)


def _mlx(report: MemoryReport) -> str:
    held = f"{size(report.active)} now, {size(report.peak)} at most, {size(report.cache)} cached"
    return facts({"MLX holds": held})


def counters(found: PhaseCounters) -> str:
    """A stacked bar of where the time went, and the counts beside it."""
    phases = [(n, getattr(found, f"{n}_ns")) for n in PHASE_WORDS]
    total, calls = max(found.total_ns, 1), max(found.calls, 1)
    rows = [
        (i, (n, f"{ns / 1e6:.1f} ms", f"{ns / 1e6 / calls:.3f} ms/token", f"{ns / total:.1%}",
             PHASE_WORDS[n]))
        for i, (n, ns) in enumerate(phases) if ns
    ]  # fmt: skip
    hits, reads = found.expert_hit_rate, size(found.expert_io_bytes_requested)
    counts = facts({
        "experts": None if hits is None else f"{found.expert_requests} requested, "
        f"{found.expert_hits} held ({hits:.1%}), {reads} read",
        "prefetch": f"{found.prefetch_requests} requested, {found.prefetch_hits} used"
        if found.prefetch_requests else None,
        "dropped": f"{found.passes_dropped} passes" if found.passes_dropped else None,
    })  # fmt: skip
    stack = bar([(n, ns, f"{ns / 1e6:.1f} ms, {ns / total:.1%}") for n, ns in phases])
    note = f"{found.total_ns / 1e6:.1f} ms for {found.calls} tokens in {found.passes} passes"
    return card("Phases", note, stack, legend(rows), counts)


def result(found: GenerationResult) -> str:
    """The text, how it ended and how fast it came."""
    text = found.text if found.text is not None else ", ".join(map(str, found.token_ids))
    return card("Answer", f"{found.new_tokens} tokens", quoted(text), facts(result_facts(found)))


def result_facts(found: GenerationResult) -> dict[str, str | None]:
    """The figures of a generation, in words; None for what did not happen."""
    reused = f", {found.reused_prefix_tokens} reused" if found.reused_prefix_tokens else ""
    end = found.stop_reason
    if found.stop_string is not None:
        end += f": {found.stop_string!r}"
    elif found.stop_token_id is not None:
        end += f": token {found.stop_token_id}"
    fed = f"{found.prompt_tokens} tokens{reused} in {found.prefill_seconds:.2f} s"
    made = f"{found.new_tokens} tokens in {found.decode_seconds:.2f} s"
    hits = found.phases.expert_hit_rate
    return {
        "stopped": end,
        "prompt": _joined(fed, speed(found.prefill_tokens_per_second)),
        "answer": _joined(made, speed(found.decode_tokens_per_second)),
        "seed": None if found.seed is None else str(found.seed),
        "expert hits": None if hits is None else f"{hits:.1%}",
        "speculation": None if found.speculation is None else str(found.speculation),
    }


def _joined(*words: str | None) -> str:
    return ", ".join(word for word in words if word)


def runner(found: Runner) -> str:
    """The model, what "auto" became, the context in use and the memory bar."""
    chosen = found.resolved
    note = f"{chosen.family} ({chosen.model_type}) on {chosen.device}, {chosen.dtype}"
    if found.closed:
        return card(found.path.name, note, facts({"state": "closed"}))
    experts = None
    if found.arch.num_experts:
        held = "" if chosen.expert_residency == "resident" else (
            f", {chosen.expert_cache_slots} slots per layer"
        )  # fmt: skip
        experts = (
            f"{found.arch.num_experts} per layer, {found.arch.top_k_experts} per token; "
            f"{chosen.expert_residency}{held}"
        )
    used = f"{found.position} of {found.max_context} tokens"
    rows = {
        "layers": f"{found.arch.num_layers} of width {found.arch.hidden_size}",
        "weights": chosen.weights,
        "experts": experts,
        "kv_quant": None if chosen.kv_quant == "off" else chosen.kv_quant,
        "prefix reuse": "on" if found.prefix_reuse else None,
        "conversations": str(found.session_slots) if found.session_slots > 1 else None,
        "steering": found.steering_line,
        "context": used,
    }
    by_vector = zip(*(found.steering_coefficients or []), strict=True)
    said = "coefficients per layer of the last row; the second colour is below zero"
    coefficients = [
        facts({f"vector {i}": said}) + strip(values, f"vector {i}: {said}")
        for i, values in enumerate(by_vector, 1)
    ]
    report = found.memory
    fill = gauge("context", found.position, found.max_context, used)
    plan = facts({"memory": f"{size(report.planned)} planned"})
    parts = [facts(rows), fill, *coefficients, plan, memory_bar(report), _mlx(report)]
    return card(found.path.name, note, *parts)


def speculation(found: SpeculationStats) -> str:
    """What drafting gave per round, acceptance by position, and where its time went."""
    if not found.rounds:
        return card("Speculation", f"{found.drafter}: no rounds")
    note = f"{found.drafter}, up to {found.width} proposals a round"
    shares = ["-" if share is None else f"{share:.0%}" for share in found.per_position_acceptance]
    rows = {
        "rounds": f"{found.rounds}, {found.committed_per_round or 0:.2f} tokens each",
        "accepted": f"{found.accepted} of {sum(found.offered)} judged proposals",
        "by position": ", ".join(shares),
        "rollbacks": str(found.rollbacks),
    }
    parts = [(n, getattr(found, f"{n}_seconds")) for n in ("draft", "verify", "rollback")]
    stack = bar([(n, s, f"{s:.2f} s") for n, s in parts])
    named = legend((i, (n, f"{s:.2f} s", "")) for i, (n, s) in enumerate(parts) if s)
    return card("Speculation", note, facts(rows), stack, named)


def steering(found: SteeringPolicy) -> str:
    """Every vector of a policy, with the length of its direction per layer."""
    parts = []
    for vector in found.vectors:
        blocks = vector.set.covered_layers
        norms = {b: float((d * d).sum()) ** 0.5 for b, d in vector.set.directions.items()}
        words = f"lengths of the directions at layers {blocks[0]} to {blocks[-1]}"
        parts.append(facts({str(vector): words}))
        parts.append(strip([norms.get(block) for block in range(blocks[-1] + 1)], words))
    return card("Steering", str(found), *parts)


def options(rows: Mapping[str, Any], title: str) -> str:
    """Names and values of a set of options."""
    words = {name: "none" if value in (None, ()) else str(value) for name, value in rows.items()}
    return card(title, "", facts(words))


def stream(prompt: tuple[int, int], text: str, tokens: int, seconds: float) -> str:
    """A generation under way: the prompt's progress, then the text so far."""
    done, total = prompt
    if not tokens:
        note = f"prompt {done} of {total} tokens"
        return card("Answer", note, gauge("prompt", done, total, note))
    rate = f", {tokens / seconds:.1f} tokens/s" if seconds > 0 else ""
    return card("Answer", f"{tokens} tokens{rate} …", quoted(text))
