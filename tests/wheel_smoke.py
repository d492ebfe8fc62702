"""What an installed wheel must do without the repository around it; run by `make wheel`.

    python tests/wheel_smoke.py

Uses nothing but the package: its files, its command, and one answer of a random model.
"""

import subprocess
import sys
import tempfile
from importlib.metadata import distribution
from importlib.resources import files
from pathlib import Path

import turbospark

package = Path(turbospark.__file__).parent
assert "site-packages" in package.parts, f"the repository was imported: {package}"
assert files("turbospark").joinpath("py.typed").is_file()
assert any(files("turbospark").joinpath("kernels/preludes").iterdir())
assert distribution("turbospark").version == turbospark.__version__
assert not (package.parent / "tests").exists()
for name in turbospark.__all__:
    assert getattr(turbospark, name) is not None, name

with tempfile.TemporaryDirectory() as folder:
    moe = turbospark.synth("qwen3_moe", Path(folder, "moe.gturbo"), bits=4, progress=False)
    answers = []
    for residency in ("streamed", "resident"):
        with turbospark.Runner.open(moe, max_context=64, expert_residency=residency) as runner:
            answers.append(runner.generate([1, 2, 3], temperature=0, max_new_tokens=8).token_ids)
    assert answers[0] == answers[1] and len(answers[0]) == 8
    command = [sys.executable, "-I", "-m", "turbospark"]
    found = subprocess.run([*command, "info", moe], capture_output=True, text=True, check=True)
    assert "qwen3_moe" in found.stdout
    assert Path(sys.executable).with_name("turbospark").exists()  # the command itself
    refused = subprocess.run([*command, "run", "nothing", "hi"], capture_output=True, text=True)
    assert refused.returncode == 1 and refused.stderr.startswith("turbospark: 'nothing' is neither")
print(f"turbospark {turbospark.__version__} from {package.parent}: the wheel works")
