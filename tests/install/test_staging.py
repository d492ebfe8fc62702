"""Publication is atomic: an interrupted conversion leaves nothing that opens."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from handmade import ARCH

import turbospark.install.staging as staging
from turbospark.dtypes import Raw, affine
from turbospark.errors import (
    InstallExistsError,
    OptionError,
    PartialInstallError,
    SourceError,
    TurbosparkError,
    UnsupportedError,
)
from turbospark.install.arch import ArchConfig
from turbospark.install.files import as_path
from turbospark.install.opening import Install
from turbospark.install.packed import RecordLayout
from turbospark.install.planes import Planes, quantize
from turbospark.install.quant import quant_block
from turbospark.install.staging import StagedInstall

DENSE = ArchConfig.from_manifest(
    {**ARCH, "numExperts": 0, "topKExperts": 0, "moeIntermediateSize": 0, "family": "llama"}
)


def fill(staged: StagedInstall, value: float = 1.0) -> None:
    staged.resident.add("w", Raw("float32"), (2, 2))
    staged.resident.write("w", Planes(Raw("float32"), (2, 2), mx.full((2, 2), value)))


def make(dest: Path, value: float = 1.0, force: bool = False, **more: Any) -> Path:
    with StagedInstall(dest, force) as staged:
        fill(staged, value)
        staged.write_sidecar("tokenizer.json", b"{}")
        return staged.publish(arch=DENSE, model_id="toy", **more)


def value_of(dest: Path) -> float:
    with Install.open(dest, verify="full") as install:
        return install.resident.read("w").weight[0, 0].item()


def test_a_published_install_opens_with_config_sidecars_and_a_valid_receipt(tmp_path: Path) -> None:
    dest = tmp_path / "new" / "toy.gturbo"
    extension = {"config": {"model_type": "llama", "rope_theta": 1e4}, "hasTokenizer": True}
    assert make(dest, 3.0, extension=extension, source_revision="abc") == dest
    assert value_of(dest) == 3.0
    with Install.open(dest, verify="receipt", expecting=DENSE) as install:
        assert install.config == {"model_type": "llama", "rope_theta": 1e4}
        assert install.manifest.extension["hasTokenizer"] is True
        assert install.manifest.source_snapshot_hash == "abc"
        assert install.experts is None and install.bytes_per_slot == 0
        assert install.sidecar("tokenizer.json") == dest / "tokenizer.json"
        assert install.sidecar("vocab.json") is None
        with pytest.raises(TurbosparkError):
            install.sidecar("../secret")
    assert sorted(p.name for p in dest.parent.iterdir()) == ["toy.gturbo"]
    assert sorted(p.name for p in dest.iterdir()) == [
        "manifest.json", "model_weights.bin", "packed_experts", "tokenizer.json",
        "verified-install.json",
    ]  # fmt: skip


def test_a_routed_install_names_its_layers_strides_and_quantization(tmp_path: Path) -> None:
    arch = ArchConfig.from_manifest(ARCH)
    fmt = affine(4, 64)
    record = RecordLayout.build(
        {"gate": (fmt, (64, 128)), "up": (fmt, (64, 128)), "down": (fmt, (128, 64))}
    )
    with StagedInstall(tmp_path / "m") as staged:
        fill(staged)
        for layer in range(2):
            staged.experts.begin_layer(layer, 4, record)
            for e in range(4):
                parts = record.parts().items()
                staged.experts.write(e, {r: quantize(mx.ones(s), f) for r, (f, s) in parts})
            staged.experts.end_layer()
        quant = quant_block({"embedding": fmt, "attention": fmt, "router": affine(8, 64)})
        staged.publish(arch=arch, model_id="toy", quant=quant)
    manifest = json.loads((tmp_path / "m" / "manifest.json").read_text())
    assert manifest["magic"] == "GTURBO" and manifest["versionMajor"] == 1
    assert manifest["flags"]["streamingPresent"] is True
    assert (manifest["numLayers"], manifest["expertsPerLayer"]) == (2, 4)
    assert manifest["expertStride"] == 16384
    assert manifest["quant"]["sharedExpert"] == manifest["quant"]["attention"]
    assert set(manifest["files"]) == {
        "model_weights.bin", "packed_experts/layout.json", "packed_experts/layer_00.bin",
        "packed_experts/layer_01.bin",
    }  # fmt: skip
    with Install.open(tmp_path / "m", verify="full") as install:
        assert install.bytes_per_slot == 2 * 16384


def test_a_layout_that_contradicts_the_architecture_is_never_published(tmp_path: Path) -> None:
    with pytest.raises(TurbosparkError, match="expertsPerLayer is 0"):
        s = StagedInstall(tmp_path / "m")
        with s:
            fill(s)
            s.publish(arch=ArchConfig.from_manifest(ARCH), model_id="toy")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_any_exception_removes_what_was_written(tmp_path: Path, error) -> None:
    with pytest.raises(error), StagedInstall(tmp_path / "m") as staged:
        fill(staged)
        assert staged.path.is_dir()
        raise error("stop")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", ["receipt_bytes", "manifest_bytes", "write_file", "sync_path"])
def test_a_failure_in_any_step_of_publishing_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    make(tmp_path / "old.gturbo", 1.0)

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(staging, step, fail)
    full = pytest.raises(TurbosparkError, match="cannot be written: No space")
    with full, StagedInstall(tmp_path / "new.gturbo") as s:
        fill(s)
        s.publish(arch=DENSE, model_id="toy")
    full = pytest.raises(TurbosparkError, match="cannot be written: No space")
    with full, StagedInstall(tmp_path / "old.gturbo", True) as s:
        fill(s, 2.0)
        s.publish(arch=DENSE, model_id="toy")
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["old.gturbo"]
    assert value_of(tmp_path / "old.gturbo") == 1.0


@pytest.mark.parametrize("error", [OSError(5, "I/O error"), KeyboardInterrupt()])
def test_a_failure_of_the_last_rename_puts_the_old_install_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    dest = make(tmp_path / "m", 1.0)
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise error
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises((InstallExistsError, KeyboardInterrupt)):
        make(dest, 2.0, force=True)
    monkeypatch.undo()
    assert value_of(dest) == 1.0 and [p.name for p in tmp_path.iterdir()] == ["m"]


def test_leaving_without_publish_leaves_nothing(tmp_path: Path) -> None:
    with StagedInstall(tmp_path / "m") as staged:
        fill(staged)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_tensor_prevents_publication(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="first b"), StagedInstall(tmp_path / "m") as staged:
        fill_only = Planes(Raw("float32"), (1,), mx.ones((1,)))
        staged.resident.add("a", Raw("float32"), (1,))
        staged.resident.add("b", Raw("float32"), (1,))
        staged.resident.write("a", fill_only)
        staged.publish(arch=DENSE, model_id="toy")
    assert list(tmp_path.iterdir()) == []


CHILD = """
import sys, time
sys.path[:0] = [{tests!r}]
import test_staging as t
from pathlib import Path
import turbospark.install.staging as staging
stop_at = {stop!r}
if stop_at:
    real = getattr(staging, stop_at)
    def pause(*a, **k):
        print("ready", flush=True)
        time.sleep(60)
    setattr(staging, stop_at, pause)
with staging.StagedInstall(Path({dest!r}), True) as s:
    t.fill(s, 9.0)
    if not stop_at:
        print("ready", flush=True)
        time.sleep(60)
    s.publish(arch=t.DENSE, model_id="toy")
"""


def killed(dest: Path, stop: str | None, sig: int = signal.SIGKILL) -> int:
    """Run a conversion to `dest` in another process and kill it at `stop`; its pid."""
    code = CHILD.format(tests=str(Path(__file__).parent), dest=str(dest), stop=stop)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        child.send_signal(sig)
        child.wait(timeout=30)
        return child.pid


@pytest.mark.parametrize("stop", [None, "manifest_bytes", "check_sync"])
def test_a_killed_conversion_leaves_nothing_that_opens_and_is_tidied_by_the_next(
    tmp_path: Path, stop: str | None
) -> None:
    dest = tmp_path / "m.gturbo"
    make(dest, 1.0)
    pid = killed(dest, "sync_path" if stop == "check_sync" else stop)
    partial = tmp_path / f"m.gturbo.partial-{pid}"
    assert partial.is_dir()
    assert (partial / "manifest.json").exists() == (stop == "check_sync")
    with pytest.raises(PartialInstallError):
        Install.open(partial)
    assert value_of(dest) == 1.0
    make(dest, 2.0, force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["m.gturbo"]
    assert value_of(dest) == 2.0


def test_a_conversion_killed_between_the_two_renames_gives_the_old_install_back(
    tmp_path: Path,
) -> None:
    dest = tmp_path / "m.gturbo"
    make(dest, 1.0)
    dest.rename(tmp_path / "m.gturbo.replaced-99999")
    with pytest.raises(PartialInstallError):
        Install.open(tmp_path / "m.gturbo.replaced-99999")
    with pytest.raises(ZeroDivisionError), StagedInstall(dest, force=True):
        raise ZeroDivisionError
    assert value_of(dest) == 1.0
    assert [p.name for p in tmp_path.iterdir()] == ["m.gturbo"]


def test_a_running_conversion_is_not_tidied_away(tmp_path: Path) -> None:
    dest = tmp_path / "m.gturbo"
    code = CHILD.format(tests=str(Path(__file__).parent), dest=str(dest), stop=None)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        make(dest, 5.0)
        partial = tmp_path / f"m.gturbo.partial-{child.pid}"
        assert (partial / "model_weights.bin").exists()
        child.kill()
    assert value_of(dest) == 5.0


def test_two_conversions_of_one_process_to_one_place_are_refused(tmp_path: Path) -> None:
    with StagedInstall(tmp_path / "m"), pytest.raises(InstallExistsError, match="another"):
        StagedInstall(tmp_path / "m").__enter__()
    assert list(tmp_path.iterdir()) == []


def test_an_existing_install_needs_force_and_is_replaced_whole(tmp_path: Path) -> None:
    dest = make(tmp_path / "m", 1.0)
    (dest / "notes.txt").write_text("old")
    with pytest.raises(InstallExistsError, match="pass force"):
        make(dest, 2.0)
    assert value_of(dest) == 1.0
    make(dest, 2.0, force=True)
    assert value_of(dest) == 2.0 and not (dest / "notes.txt").exists()


def test_force_never_removes_what_is_not_an_install(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "a.jpg").write_bytes(b"x")
    (folder / "manifest.json").write_text('{"magic": "OTHER"}')
    file = tmp_path / "file"
    file.write_text("x")
    link = tmp_path / "link"
    link.symlink_to(make(tmp_path / "real"))
    for dest in (folder, file, link):
        with pytest.raises(InstallExistsError):
            make(dest, force=True)
    assert (folder / "a.jpg").exists() and file.exists() and value_of(link) == 1.0


def test_a_directory_that_appears_during_the_conversion_is_not_overwritten(tmp_path: Path) -> None:
    dest = tmp_path / "m"
    with pytest.raises(InstallExistsError), StagedInstall(dest) as staged:
        fill(staged)
        dest.mkdir()
        (dest / "mine").write_text("x")
        staged.publish(arch=DENSE, model_id="toy")
    assert (dest / "mine").exists() and [p.name for p in tmp_path.iterdir()] == ["m"]


def test_an_empty_directory_is_replaced_with_force_only(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    with pytest.raises(InstallExistsError):
        make(tmp_path / "m")
    make(tmp_path / "m", 4.0, force=True)
    assert value_of(tmp_path / "m") == 4.0


@pytest.mark.parametrize("name", ["../x", "/x", "a/b", "manifest.json", "model_weights.bin", ""])
def test_a_sidecar_cannot_take_another_place(tmp_path: Path, name: str) -> None:
    with pytest.raises(TurbosparkError), StagedInstall(tmp_path / "m") as staged:
        staged.write_sidecar(name, b"x")
    assert list(tmp_path.iterdir()) == []


def test_a_configuration_that_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    for bad in (float("nan"), float("inf"), {1, 2}):
        with pytest.raises(SourceError, match="cannot hold this configuration"):
            make(tmp_path / "m", extension={"config": {"x": bad}})
    with pytest.raises(UnsupportedError, match="would take"):
        make(tmp_path / "m", extension={"config": {"x": "y" * (5 << 20)}})


def test_quant_block_is_written_only_where_the_original_accepts_it() -> None:
    four, eight = affine(4, 64), affine(8, 64)
    assert quant_block({"attention": four, "embedding": four, "router": eight}) is not None
    assert quant_block({"attention": four, "router": Raw("float32")})["router"]["scheme"] == "raw"
    assert quant_block({"attention": affine(1, 128, "float16")}) is not None
    for bad in (
        {"attention": eight},
        {"attention": four, "embedding": eight},
        {"attention": affine(4, 32)},
        {"attention": affine(4, 64, "float16")},
        {"attention": Raw("bfloat16")},
        {},
    ):
        assert quant_block(bad) is None


def test_stale_leftovers_of_other_names_are_left_alone(tmp_path: Path) -> None:
    for name in ("other.partial-1", "m.partial-x", "m.partial-1.txt"):
        (tmp_path / name).mkdir()
    (tmp_path / "m.partial-1").mkdir()
    make(tmp_path / "m")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "m", "m.partial-1.txt", "m.partial-x", "other.partial-1"
    ]  # fmt: skip


def test_a_destination_below_a_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for dest in (tmp_path / "file" / "a", tmp_path / "file" / "a" / "b"):
        with pytest.raises(TurbosparkError, match=f"{dest} cannot be written"), StagedInstall(dest):
            pass
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_destination_named_like_a_staging_directory_is_refused(tmp_path: Path) -> None:
    # It would never open, and the next conversion to `m` would remove it.
    for name in ("m.partial-12", "m.replaced-12"):
        with pytest.raises(OptionError, match="never opens"), StagedInstall(tmp_path / name):
            pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "value", [None, 5, b"x", "a\0b", "x" * 300, "~no-such-user-here/x", "\ud800"]
)
def test_what_is_no_path_is_refused_by_option_and_value(value: object) -> None:
    with pytest.raises(OptionError, match=r"^dest") as caught:
        as_path(value, "dest")
    assert "\n" not in str(caught.value)
