"""Make tests/data/oracles: tiny random checkpoints, and the answers a correct runtime must give.

    python make_oracles.py [--list] [NAME ...]        (shell patterns; default: every case)

Needs torch 2.13.0 (CPU), transformers 5.24.0, mlx 0.32.4 (CPU) and mlx-lm 0.32.2. Each folder
receives what a checkpoint folder of that family holds, and `oracle.npz`:

    input_ids     int32   [1, T]
    logits        float32 [T, vocab]  one forward pass without a cache
    greedy_ids    int32   [16]        the greedy continuation
    greedy_logits float32 [16, vocab] what each of them was taken from
    margins       float32 [16]        top-1 minus top-2 of those
    routing_gap   float32             smallest distance between a chosen and a passed-over expert

The answers are computed in float32 from the very files that are written (transformers in eager
mode; mlx-lm for quantized trees and for spark2_5). Weights depend on the tensor's name and shape
only, so variants that differ in config.json share one file: later folders link to the first.
"""

from __future__ import annotations

import argparse
import filecmp
import fnmatch
import importlib
import importlib.metadata
import json
import math
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")

import mlx.core as mx
import numpy as np
import torch
import transformers
from mlx.utils import tree_flatten
from oracle_cases import Case, cases
from safetensors.torch import load_file, save_file

OUT = Path(__file__).parent / "oracles"
SEED = 20260101
GREEDY = 16
SPREAD = 2.3  # standard deviation of the logits
MARGIN, GAP, DISTINCT = 0.06, 1e-3, 7  # what a prompt must reach; far above float32 noise
NUDGE, STEADY = 1e-6, 4e-4  # how little logits may move when the embeddings move by NUDGE of them
Tensors = dict[str, torch.Tensor]


# --- weights --------------------------------------------------------------------------------------

# First match wins: (pattern, law, a, b). "matrix" scales a by 1/sqrt(inputs).
LAWS: tuple[tuple[str, str, float, float], ...] = (
    (r"A_log$", "uniform", math.log(0.03), math.log(1.5)),
    (r"dt_bias$", "uniform", -3.0, 0.5),
    (r"layer_scalar$", "uniform", 0.6, 1.1),
    (r"sinks$", "normal", 0.0, 1.0),
    (r"bias$", "normal", 0.0, 0.3),
    (r"conv1d", "normal", 0.0, 0.5),
    (r"lm_head\.weight$", "matrix", 1.0, 0),
    (r"embed_tokens_per_layer", "normal", 0.0, 0.25),
    (r"(embed_tokens|embedding)\.weight$", "normal", 0.0, 0.05),
    (r"ngram_embedding\.", "normal", 0.0, 1.0),
    (r"(block_inject|input_mix)_weight", "matrix", 4.0, 0),
    (r"(q_proj|k_proj|q_[ab]_proj|kv_a_proj_with_mqa|kv_b_proj)", "matrix", 1.4, 0),
    (r"(router|mlp\.gate|block_sparse_moe\.gate)\b", "matrix", 2.0, 0),
    (r"(gate_up_proj|gate_proj|up_proj|w1|w3)", "matrix", 1.3, 0),
    (r"(down_proj|w2)", "matrix", 1.5, 0),
    (r"", "matrix", 1.0, 0),
)
FINAL_NORM = re.compile(r"(^|\.)(model|language_model)\.norm\.weight$")


def draw(name: str, initial: torch.Tensor, case: Case) -> np.ndarray:
    """A float32 value for one tensor from its name, its shape and what it was initialised to."""
    shape = tuple(initial.shape)
    rng = np.random.default_rng([SEED, zlib.crc32(name.encode())])
    _, law, a, b = next(row for row in LAWS if re.search(row[0], name))
    if law == "uniform":
        return rng.uniform(a, b, shape)
    if len(shape) == 1 and law == "matrix":
        return rng.normal(norm_mean(name, initial, case), 0.25, shape)
    if law == "matrix":
        transposed = case.config["model_type"] == "gpt_oss" and len(shape) == 3
        a, b = 0.0, a / math.sqrt(max(shape[1 if transposed else -1], 1))
        if transposed and "gate_up" in name:
            b *= 2  # so that the clamp is reached
    return rng.normal(a, b, shape)


def norm_mean(name: str, initial: torch.Tensor, case: Case) -> float:
    """Around 1, except where the family's own scales ask for more or less."""
    mean, family = 1.0, case.config["model_type"]
    if FINAL_NORM.search(name) or "hyper_connection_mixer.hc_norm" in name:
        tied = case.text["tie_word_embeddings"]
        head = 0.05 * math.sqrt(case.text["hidden_size"]) if tied else 1.0
        mean = SPREAD / head / case.text.get("output_multiplier", 1.0)
        if "hc_norm" in name:
            mean *= 2 * math.sqrt(case.text["hc_count"])  # a mean of streams, each halved
    elif family.startswith("gemma4") and re.search(r"[qk]_norm", name):
        mean = 0.6  # there is no 1/sqrt(d): these norms carry the scale
    elif family.startswith("gemma") and "post_" in name:
        mean = 2.2
    centred = not initial.any()  # initialised to zeros, so used as 1 + weight
    return mean - centred


def rounded(value: np.ndarray, store: str) -> torch.Tensor:
    return torch.from_numpy(np.asarray(value, np.float32)).to(getattr(torch, store))


def store_of(name: str, case: Case) -> str:
    return case.stores[max((end for end in case.stores if name.endswith(end)), key=len)]


def mxfp4(name: str, shape: tuple[int, ...]) -> Tensors:
    """Random blocks and exponents in place of one stacked matrix [experts, inputs, outputs]."""
    experts, inputs, outputs = shape
    rng = np.random.default_rng([SEED, zlib.crc32(name.encode())])
    level = -3 if "gate_up" in name else -4  # the values before scaling have deviation 2.9
    blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
    scales = rng.integers(127 + level - 1, 127 + level + 1, blocks.shape[:-1], np.uint8)
    return {
        f"{name}_blocks": torch.from_numpy(blocks),
        f"{name}_scales": torch.from_numpy(scales),
    }


def fuse(tensors: Tensors) -> Tensors:
    """Experts as released: one gate_up_proj and one down_proj per layer."""
    out, groups = {}, {}
    for name, value in tensors.items():
        found = re.match(r"(.*\.mlp\.experts)\.(\d+)\.(\w+)\.weight$", name)
        if found:
            groups.setdefault(found[1], {})[found[3], int(found[2])] = value
        else:
            out[name] = value
    for stem, parts in groups.items():
        count = len(parts) // 3
        pairs = [torch.cat([parts["gate_proj", i], parts["up_proj", i]]) for i in range(count)]
        out[f"{stem}.gate_up_proj"] = torch.stack(pairs)
        out[f"{stem}.down_proj"] = torch.stack([parts["down_proj", i] for i in range(count)])
    return out


def checkpoint(case: Case, initial: Tensors) -> Tensors:
    """The tensors of the case's file, under the names it is published with."""
    if case.fuse_experts:
        initial = fuse(initial)
    for name, shape in (case.extra(case.config) if case.extra else {}).items():
        initial.setdefault(name, torch.ones(shape))
    out: Tensors = {}
    for name, value in sorted(initial.items()):
        if case.mxfp4_experts and re.search(r"experts\.(gate_up|down)_proj$", name):
            out |= mxfp4(name, tuple(value.shape))
        elif not value.is_floating_point():
            out[name] = value  # numbers that the model derives from its configuration
        else:
            out[name] = rounded(draw(name, value, case), store_of(name, case))
    return out


def write(folder: Path, tensors: Tensors, shards: int = 1) -> None:
    """model.safetensors, or shards that part neighbours in the alphabet, with their index."""
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    where, names = {}, sorted(tensors)
    for number in range(shards):
        part = {name: tensors[name] for name in names[number::shards]}
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        save_file(part, folder / file, {"format": "pt"})
        where |= dict.fromkeys(part, file)
    total = sum(value.nbytes for value in tensors.values())
    dump(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))},
    )


def dump(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


# --- references: answers(ids [B, T]) -> float32 logits [B, T, vocab] ------------------------------


def lower_first(values: torch.Tensor, k: int, dim: int = -1, **_: Any) -> Any:
    """torch.topk, which leaves open which of equal values it takes; here those of lower index.

    Scores of key blocks are often equal: whatever no index head likes scores 0.
    """
    found = values.sort(dim=dim, descending=True, stable=True)
    return torch.return_types.topk([part.narrow(dim, 0, k) for part in found])


class Transformers:
    """transformers in eager mode, float32."""

    def __init__(self, case: Case) -> None:
        image = case.reader == "image-text"
        names = transformers
        self.auto = names.AutoModelForImageTextToText if image else names.AutoModelForCausalLM
        self.case = case
        self.gaps = np.array([np.inf])

    def initial(self) -> tuple[Tensors, dict[str, Any]]:
        """Freshly initialised tensors under their file names, and the config it would save."""
        values = {k: v for k, v in self.case.config.items() if k != "quantization_config"}
        mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING
        config = mapping[values["model_type"]].from_dict(json.loads(json.dumps(values)))
        with tempfile.TemporaryDirectory() as folder:
            self.auto.from_config(config, dtype=torch.float32).save_pretrained(folder)
            saved = json.loads(Path(folder, "config.json").read_text())
            return load_file(Path(folder, "model.safetensors")), saved

    def load(self, folder: Path) -> None:
        more: dict[str, Any] = {}
        if self.case.mxfp4_experts:
            more["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
        self.model, info = self.auto.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True,
            **more,
        )  # fmt: skip
        if info["missing_keys"]:
            raise SystemExit(f"{folder.name}: missing {sorted(info['missing_keys'])[:5]}")
        self.model = self.model.float().eval()
        for module in self.model.modules():
            if type(module).__name__.lower().endswith("router"):
                module.register_forward_hook(self._watch)

    def _watch(self, module: Any, args: Any, out: tuple[torch.Tensor, ...]) -> None:
        """Keep the smallest gap between the last expert chosen and the first passed over."""
        text, scores = self.case.text, out[0].detach().float()
        if "Gemma4" in type(module).__name__:
            scores = scores.log()  # it returns probabilities
        if text.get("topk_method") == "group_limited_greedy":
            groups = scores.unflatten(-1, (text["n_group"], -1))
            best = groups.amax(-1)
            self._lower(best, text["topk_group"])
            kept = best >= best.topk(text["topk_group"]).values[:, -1:]
            scores = groups.masked_fill(~kept.unsqueeze(-1), -1e9).flatten(-2)
        self._lower(scores, text.get("num_experts_per_tok") or text["top_k_experts"])

    def _lower(self, scores: torch.Tensor, count: int) -> None:
        top = scores.sort(-1, descending=True).values
        gaps = (top[:, count - 1] - top[:, count]).unflatten(0, (self.rows, -1))
        self.gaps = np.minimum(self.gaps, gaps.amin(-1).numpy())

    def answers(self, ids: np.ndarray) -> np.ndarray:
        self.rows, self.gaps = len(ids), np.full(len(ids), np.inf)
        with torch.no_grad():
            return self.model(torch.from_numpy(ids).long(), use_cache=False).logits.float().numpy()

    def steady(self, ids: np.ndarray) -> bool:
        """Whether rounding stays small: some prompts amplify it past what tests can allow."""
        before = self.answers(ids)
        table = self.model.get_input_embeddings().weight.data
        kept, moved = table.clone(), 0.0
        for seed in range(3):
            noise = torch.randn(kept.shape, generator=torch.Generator().manual_seed(seed))
            table.copy_(kept * (1 + NUDGE * noise))
            moved = max(moved, float(np.abs(self.answers(ids) - before).max()))
        table.copy_(kept)
        return moved < STEADY


class MlxLm:
    """mlx-lm on the CPU with float32 activations."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.gaps = np.array([np.inf])

    def initial(self) -> tuple[Tensors, dict[str, Any]]:
        module = importlib.import_module(f"mlx_lm.models.{self.case.config['model_type']}")
        model = module.Model(module.ModelArgs.from_dict(self.case.config))
        flat = dict(tree_flatten(model.parameters()))
        return {k: torch.from_numpy(np.array(v)) for k, v in flat.items()}, {}

    def load(self, folder: Path) -> None:
        from mlx_lm.utils import load_model

        self.model, _ = load_model(folder, lazy=False, strict=True)
        self.model.set_dtype(mx.float32)

    def answers(self, ids: np.ndarray) -> np.ndarray:
        self.gaps = np.full(len(ids), np.inf)
        return np.array(self.model(mx.array(ids)).astype(mx.float32))

    def steady(self, ids: np.ndarray) -> bool:
        """Not measured: quantized tables cannot be moved a little."""
        return True


def reader_of(case: Case) -> Transformers | MlxLm:
    return MlxLm(case) if case.reader == "mlx" else Transformers(case)


def source_of(case: Case) -> Transformers | MlxLm:
    """Who knows the published tensor names: mlx-lm only where transformers lacks the family."""
    if case.config["model_type"] == "spark2_5":
        return MlxLm(case)
    kind = "image-text" if "text_config" in case.config else "causal"
    return Transformers(replace(case, reader=kind))


def convert_with_mlx(case: Case, source: Path, dest: Path) -> None:
    """mlx-lm's own conversion of `source`, less the tokenizer that it insists on."""
    from mlx_lm import convert
    from tokenizers import Tokenizer, models

    words = {f"t{i}": i for i in range(case.text["vocab_size"])}
    Tokenizer(models.WordLevel(words, unk_token="t0")).save(str(source / "tokenizer.json"))
    dump(source / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    settings = dict(case.quant or {})
    convert(str(source), str(dest), quantize=bool(settings), dtype="bfloat16", **settings)
    tensors: Tensors = {}
    for file in sorted(dest.glob("*.safetensors")):
        tensors |= load_file(file)
    for file in dest.iterdir():
        if file.name not in ("config.json", "generation_config.json"):
            file.unlink()
    write(dest, tensors, case.shards)


# --- prompts --------------------------------------------------------------------------------------


def top_margins(rows: np.ndarray) -> np.ndarray:
    top = np.sort(rows, -1)
    return top[..., -1] - top[..., -2]


def choose_prompt(case: Case, reader: Transformers | MlxLm) -> dict[str, np.ndarray]:
    """The first random prompt that continues without near-ties or close routes, with variety."""
    for attempt in range(40):
        rng = np.random.default_rng([SEED, 1, attempt])
        ids = rng.integers(4, case.text["vocab_size"], (12, case.tokens)).astype(np.int32)
        near = np.full(len(ids), np.inf)
        for _ in range(GREEDY):
            last = reader.answers(ids)[:, -1]
            near = np.minimum(near, top_margins(last))
            ids = np.concatenate([ids, last.argmax(-1)[:, None].astype(np.int32)], 1)
        varied = np.array([len(set(row[case.tokens :].tolist())) >= DISTINCT for row in ids])
        for row in np.flatnonzero((near > MARGIN) & (reader.gaps > GAP) & varied):
            if reader.steady(ids[row : row + 1]):
                return answer(case, reader, ids[row : row + 1])
    raise SystemExit(f"{case.name}: no prompt is clear enough")


def answer(case: Case, reader: Transformers | MlxLm, ids: np.ndarray) -> dict[str, np.ndarray]:
    """What oracle.npz holds, from a prompt with its continuation [1, T + 16]."""
    rows = reader.answers(ids)[0]
    gap, after = reader.gaps[0], rows[case.tokens - 1 : -1]
    if not np.array_equal(after.argmax(-1), ids[0, case.tokens :]):
        raise SystemExit(f"{case.name}: the continuation is not reproducible")
    return dict(
        input_ids=ids[:, : case.tokens],
        logits=reader.answers(ids[:, : case.tokens])[0],
        greedy_ids=ids[0, case.tokens :],
        greedy_logits=after,
        margins=top_margins(after),
        routing_gap=np.float32(gap),
    )


# --- folders --------------------------------------------------------------------------------------


def make(case: Case) -> None:
    """Write one folder of OUT."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "source")
        folder.mkdir()
        initial, saved_config = source_of(case).initial()
        tensors = checkpoint(case, initial)
        config = case.config
        if case.dialect == "v5":
            kept = {k: v for k, v in config.items() if k == "quantization_config"}
            config = saved_config | kept
        # mlx-lm reads final names; transformers reads its own, so there they change at the end.
        early = case.rename if case.reader == "mlx" else None
        write(folder, renamed(tensors, early), 1 if case.quant is not None else case.shards)
        dump(folder / "config.json", config)
        dump(folder / "generation_config.json", {"eos_token_id": case.text["eos_token_id"]})
        if case.quant is not None:
            convert_with_mlx(case, folder, folder.with_name("quantized"))
            folder = folder.with_name("quantized")
        reader = reader_of(case)
        reader.load(folder)
        result = choose_prompt(case, reader)
        if case.rename and not early:
            write(folder, renamed(tensors, case.rename), case.shards)
        if case.final_config:
            dump(folder / "config.json", case.final_config)
        np.savez_compressed(folder / "oracle.npz", **result)
        publish(folder, OUT / case.name)
    print(f"{case.name:32s} margin {result['margins'].min():.3f} gap {result['routing_gap']:.1e}")


def renamed(tensors: Tensors, rename: Callable[[str], str | None] | None) -> Tensors:
    if rename is None:
        return tensors
    return {new: value for name, value in tensors.items() if (new := rename(name)) is not None}


def publish(folder: Path, dest: Path) -> None:
    """Copy a folder into place; a file that another folder already holds becomes a link to it."""
    shutil.rmtree(dest, ignore_errors=True)
    dest.mkdir(parents=True)
    for file in sorted(folder.iterdir()):
        twins = (p for p in sorted(OUT.glob(f"*/{file.name}")) if not p.is_symlink())
        big = file.stat().st_size > 10_000
        twin = next((p for p in twins if big and filecmp.cmp(p, file, shallow=False)), None)
        if twin is not None:
            (dest / file.name).symlink_to(Path("..", twin.parent.name, twin.name))
        else:
            shutil.copyfile(file, dest / file.name)


def write_readme() -> None:
    """What is in OUT, from the folders themselves, with the versions that made them."""
    packages = ("torch", "transformers", "mlx", "mlx-lm", "numpy")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    lines = [
        "# Oracle checkpoints",
        "",
        "Written by `../make_oracles.py` from `../oracle_cases.py`; do not edit. "
        f"Made with {versions}.",
        "",
        "| folder | prompt | smallest margin | smallest routing gap | weights |",
        "|---|---|---|---|---|",
    ]
    for folder in sorted(p for p in OUT.iterdir() if p.is_dir()):
        oracle = np.load(folder / "oracle.npz")
        gap = float(oracle["routing_gap"])
        files = sorted(folder.glob("*.safetensors"))
        shared = files[0].is_symlink()
        size = f"as {files[0].resolve().parent.name}" if shared else ""
        size = size or f"{sum(f.stat().st_size for f in files):,} bytes"
        lines.append(
            f"| {folder.name} | {oracle['input_ids'].shape[1]} | {oracle['margins'].min():.3f} "
            f"| {'' if math.isinf(gap) else f'{gap:.1e}'} | {size} |"
        )
    (OUT / "README.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=["*"])
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    chosen = [c for c in cases() if any(fnmatch.fnmatch(c.name, n) for n in given.names)]
    if given.list:
        print("\n".join(case.name for case in chosen))
        return
    mx.set_default_device(mx.cpu)
    torch.set_num_threads(1)
    torch.topk = torch.Tensor.topk = lower_first
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for case in chosen:
        make(case)
    write_readme()


if __name__ == "__main__":
    main()
