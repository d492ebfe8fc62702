"""What importing turbospark loads, and what it says where MLX does not load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import turbospark

UNLOADED = "libmlx.so: cannot open shared object file: No such file or directory"
CORE = f"""raise ImportError({UNLOADED!r}, name="core", path=__file__)"""


def python(script: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a script in a fresh interpreter, with `path` before everything installed."""
    search = f"import sys; sys.path.insert(0, {str(path)!r})\n" if path else "import sys\n"
    return subprocess.run([sys.executable, "-c", search + script], capture_output=True, text=True)


@pytest.fixture
def bare_mlx(tmp_path: Path) -> Path:
    """An mlx without a back end: its core fails to link, as on Linux without an extra."""
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").touch()
    (tmp_path / "mlx" / "core.py").write_text(CORE)
    return tmp_path


def test_importing_turbospark_loads_nothing_heavy() -> None:
    done = python(
        "import turbospark\n"
        "names = {'mlx', 'numpy', 'pydantic', 'tokenizers', 'huggingface_hub', 'jinja2', 'tqdm'}\n"
        "sys.exit(str(names & set(sys.modules)) if names & set(sys.modules) else 0)"
    )
    assert done.returncode == 0, done.stderr


def test_options_do_not_load_mlx() -> None:
    done = python(
        "from turbospark import OpenOptions, GenerationOptions\n"
        "OpenOptions.interactive(); GenerationOptions()\n"
        "sys.exit('mlx' in sys.modules)"
    )
    assert done.returncode == 0, done.stderr


PUBLIC = """
ArchConfig Content ControlVectorInfo DflashPolicy DraftPolicies ExpertResidency Finished
GenerationOptions GenerationResult KvQuant LoadGuard LookupPolicy MtpPolicy OpenOptions
PhaseCounters Prefill Reasoning ReleasedToolSpan Runner RuntimeToggles SpeculationStats
SteeringMode SteeringPolicy SteeringSet SteeringVector Tail Token ToolCall TurbosparkError
__version__ calibrate convert pull synth watch
"""


def test_every_public_name_is_there() -> None:
    assert sorted(turbospark.__all__) == PUBLIC.split()
    for name in turbospark.__all__:
        assert getattr(turbospark, name) is not None
    assert set(turbospark.__all__) <= set(dir(turbospark))
    with pytest.raises(AttributeError, match="no attribute 'Runnner'"):
        turbospark.Runnner  # noqa: B018


@pytest.mark.parametrize("name", ["Runner", "convert", "synth"])
def test_an_mlx_without_a_back_end_is_answered_by_one_line(bare_mlx: Path, name: str) -> None:
    done = python(
        "import turbospark\nfrom turbospark.errors import MissingDependencyError\n"
        f"try:\n    turbospark.{name}\nexcept MissingDependencyError as e:\n    print(e)",
        bare_mlx,
    )
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"mlx cannot be imported ({UNLOADED}); ")
    extras = ("turbospark[cpu]", "turbospark[cuda12]", "turbospark[cuda13]")
    assert sys.platform == "darwin" or all(extra in line for extra in extras)


@pytest.mark.parametrize("command", ["list", "run m hi", "chat m", "bench m", "convert a b"])
def test_the_command_line_says_the_same_line(bare_mlx: Path, command: str) -> None:
    done = python(f"from turbospark.cli import main\nsys.exit(main({command.split()!r}))", bare_mlx)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"turbospark: mlx cannot be imported ({UNLOADED}); ")
    assert done.stderr.count("\n") == 1


def test_an_absent_mlx_is_answered_as_well() -> None:
    done = python("sys.modules['mlx'] = None\nfrom turbospark import Runner")
    assert "turbospark.errors.MissingDependencyError: mlx cannot be" in done.stderr


def test_other_failed_imports_are_not_blamed_on_mlx() -> None:
    done = python("sys.modules['jinja2'] = None\nfrom turbospark import Runner")
    assert done.stderr.splitlines()[-1].startswith("ModuleNotFoundError: ")
    assert "jinja2" in done.stderr and "MissingDependencyError" not in done.stderr
