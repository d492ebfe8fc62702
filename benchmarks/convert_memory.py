"""Peak host memory of conversions against the promise of 1.5 x the largest tensor + 512 MiB.

    python benchmarks/convert_memory.py [--gib 1.5] [--write]

Makes synthetic checkpoints with one large embedding and with stacked experts (random bytes, no
model), converts each in a fresh process and reads that process's peak resident set. `--write`
records the figures under benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from checkout import ROOT, commit

HIDDEN, WIDTH, EXPERTS, LAYERS, FFN = 2048, 1024, 64, 2, 4096
SLACK = 512 << 20
GGUF_TYPES = {"F32": (0, 1, 4), "Q6_K": (14, 256, 210), "Q5_K": (13, 256, 176)}  # id, values, bytes


# --- synthetic checkpoints ------------------------------------------------------------------------


def fill(file: Any, count: int) -> None:
    """`count` random bytes without a sign or exponent that could be NaN (each byte below 0x3f)."""
    rng = np.random.default_rng(0)
    while count:
        step = min(count, 64 << 20)
        file.write((rng.integers(0, 256, step, dtype=np.uint8) & 0x3E).tobytes())
        count -= step


def dense_shapes(vocab: int) -> dict[str, tuple[int, ...]]:
    """Tensors of a two-layer llama with one large embedding, the head tied."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, HIDDEN), "model.norm.weight": (HIDDEN,),
    }  # fmt: skip
    for i in range(LAYERS):
        name = f"model.layers.{i}"
        shapes |= {
            f"{name}.input_layernorm.weight": (HIDDEN,),
            f"{name}.post_attention_layernorm.weight": (HIDDEN,),
            f"{name}.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{name}.self_attn.k_proj.weight": (512, HIDDEN),
            f"{name}.self_attn.v_proj.weight": (512, HIDDEN),
            f"{name}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{name}.mlp.gate_proj.weight": (FFN, HIDDEN),
            f"{name}.mlp.up_proj.weight": (FFN, HIDDEN),
            f"{name}.mlp.down_proj.weight": (HIDDEN, FFN),
        }
    return shapes


def expert_shapes(experts: int) -> dict[str, tuple[int, ...]]:
    """Tensors of a two-layer qwen3_moe whose gate and up experts are fused in one stack."""
    shapes = {k: v for k, v in dense_shapes(1024).items() if ".mlp." not in k}
    for i in range(LAYERS):
        name = f"model.layers.{i}"
        shapes |= {
            f"{name}.self_attn.q_norm.weight": (128,),
            f"{name}.self_attn.k_norm.weight": (128,),
            f"{name}.mlp.gate.weight": (experts, HIDDEN),
            f"{name}.mlp.experts.gate_up_proj": (experts, 2 * WIDTH, HIDDEN),
            f"{name}.mlp.experts.down_proj": (experts, HIDDEN, WIDTH),
        }
    return shapes


def config(**more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
        "intermediate_size": FFN, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "tie_word_embeddings": True, **more,
    }  # fmt: skip


def save_folder(path: Path, shapes: dict[str, tuple[int, ...]], settings: dict[str, Any]) -> int:
    """A bfloat16 safetensors checkpoint; returns the bytes of its largest tensor."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(settings))
    header, at = {}, 0
    for name, shape in shapes.items():
        size = int(np.prod(shape)) * 2
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        fill(file, at)
    return max(int(np.prod(s)) * 2 for s in shapes.values())


def save_gguf(path: Path, vocab: int, kind: str) -> None:
    """A llama GGUF with matrices of `kind`."""
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    text = lambda s: struct.pack("<Q", len(s)) + s.encode()  # noqa: E731
    whole = {
        "block_count": LAYERS, "embedding_length": HIDDEN, "feed_forward_length": FFN,
        "attention.head_count": 16, "attention.head_count_kv": 4, "attention.key_length": 128,
    }  # fmt: skip
    keys = [text("general.architecture") + struct.pack("<I", 8) + text("llama")]
    keys += [text(f"llama.{k}") + struct.pack("<II", 4, v) for k, v in whole.items()]
    keys.append(text("llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-5))
    rows, at = [], 0
    for name, shape in dense_shapes(vocab).items():
        stem = name.removesuffix(".weight")
        block, part = "", stem
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            block = f"blk.{layer}."
        code, values, nbytes = GGUF_TYPES["F32" if len(shape) == 1 else kind]
        dims = tuple(reversed(shape))
        row = text(f"{block}{names[part]}.weight") + struct.pack("<I", len(dims))
        rows.append(row + struct.pack(f"<{len(dims)}QIQ", *dims, code, at))
        at += int(np.prod(shape)) // values * nbytes
        at += -at % 32
    head = b"GGUF" + struct.pack("<IQQ", 3, len(rows), len(keys)) + b"".join(keys + rows)
    with path.open("wb") as file:
        file.write(head + bytes(-len(head) % 32))
        fill(file, at)


# --- measuring ------------------------------------------------------------------------------------

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16 copied": ("dense", {}),
    "bf16 to 4 bits": ("dense", {"bits": 4}),
    "bf16 to 8 bits": ("dense", {"bits": 8}),
    "bf16 to mxfp4": ("dense", {"mode": "mxfp4"}),
    "fused experts copied": ("experts", {}),
    "fused experts to 4 bits": ("experts", {"bits": 4}),
    "GGUF Q5_K repacked": ("q5_k", {}),
    "GGUF Q6_K to float32": ("q6_k", {}),
    "GGUF Q6_K to 4 bits": ("q6_k", {"bits": 4}),
}


def child(source: str, dest: str, options: str) -> None:
    """Convert and print this process's peak, and what importing alone costs."""
    from turbospark.conversion import convert

    base = peak_bytes()
    convert(source, dest, progress=False, **json.loads(options))
    print(json.dumps({"imports": base, "peak": peak_bytes()}))


def peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def measure(source: Path, options: dict[str, Any]) -> tuple[dict[str, int], int]:
    """({imports, peak}, bytes of the largest stored tensor of the install)."""
    from turbospark.install.opening import Install

    dest = source.with_name("out.gturbo")
    shutil.rmtree(dest, ignore_errors=True)
    command = [sys.executable, __file__, "--child", str(source), str(dest), json.dumps(options)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    with Install.open(dest) as install:
        sizes = [sum(size for _, size in install.resident.entry(n).planes)
                 for n in install.resident.names]  # fmt: skip
    shutil.rmtree(dest)
    return json.loads(done.stdout.splitlines()[-1]), max(sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.5, help="size of the large tensor in bf16")
    parser.add_argument("--write", action="store_true", help="record under benchmarks/results")
    parser.add_argument("--dir", default=None, help="where the synthetic checkpoints go")
    args = parser.parse_args()
    vocab = int(args.gib * (1 << 30)) // (2 * HIDDEN) // 256 * 256
    experts = max(int(args.gib * (1 << 30)) // (4 * WIDTH * HIDDEN), 2)
    rows = []
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        for name, (kind, options) in CASES.items():
            source, in_source = make(Path(folder), kind, vocab, experts)
            figures, in_install = measure(source, options)
            rows.append(report(name, figures, max(in_source, in_install)))
    if args.write:
        record(args.gib, rows)
    if not all(row["within"] for row in rows):
        sys.exit("a conversion used more memory than promised")


def make(folder: Path, kind: str, vocab: int, experts: int) -> tuple[Path, int]:
    """The checkpoint of that kind (made once, others removed) and its largest tensor's bytes."""
    path = folder / (f"{kind}.gguf" if kind.startswith("q") else kind)
    largest = {
        "dense": vocab * HIDDEN * 2, "experts": experts * 2 * WIDTH * HIDDEN * 2,
        "q5_k": vocab * HIDDEN // 256 * 176, "q6_k": vocab * HIDDEN // 256 * 210,
    }[kind]  # fmt: skip
    if not path.exists():
        for old in folder.iterdir():
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        if kind == "dense":
            save_folder(path, dense_shapes(vocab), config(vocab_size=vocab))
        elif kind == "experts":
            moe = config(
                model_type="qwen3_moe", vocab_size=1024, num_experts=experts,
                num_experts_per_tok=4, moe_intermediate_size=WIDTH,
            )  # fmt: skip
            save_folder(path, expert_shapes(experts), moe)
        else:
            save_gguf(path, vocab, kind.upper())
    return path, largest


def report(name: str, figures: dict[str, int], largest: int) -> dict[str, Any]:
    bound = largest * 3 // 2 + SLACK
    mib = lambda n: round(n / (1 << 20))  # noqa: E731
    row = {
        "case": name, "peak_mib": mib(figures["peak"]), "imports_mib": mib(figures["imports"]),
        "largest_tensor_mib": mib(largest), "bound_mib": mib(bound),
        "within": figures["peak"] <= bound,
    }  # fmt: skip
    print(
        f"{name:26} peak {row['peak_mib']:6} MiB   largest tensor {row['largest_tensor_mib']:6}"
        f"   bound {row['bound_mib']:6}   {'ok' if row['within'] else 'OVER'}",
        flush=True,
    )
    return row


def record(gib: float, rows: list[dict[str, Any]]) -> None:
    import mlx.core as mx

    import turbospark

    result = {
        "what": "peak resident set of one conversion process (getrusage)",
        "promise": "1.5 x largest tensor + 512 MiB",
        "command": f"python benchmarks/convert_memory.py --gib {gib} --write",
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "versions": {
            "turbospark": turbospark.__version__, "commit": commit(), "mlx": mx.__version__,
            "numpy": np.__version__, "python": platform.python_version(),
        },
        "rows": rows,
    }  # fmt: skip
    path = ROOT / "benchmarks" / "results" / "convert_memory.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:5])
    else:
        main()
