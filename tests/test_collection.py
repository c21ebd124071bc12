"""Which modules of tests are opened."""

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def test_a_gpu_machine_opens_modules_with_gpu_tests_only() -> None:
    """They are found by the marker in their text: a module of others may need packages that such a machine lacks."""
    code = (
        "import sys; sys.modules |= dict.fromkeys(['fastapi', 'uvicorn', 'openai', 'jsonschema']); "
        f"import pytest; sys.exit(pytest.main(['-m', 'gpu', '--collect-only', '-q', '-p', 'no:xdist', {str(TESTS)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=TESTS.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    opened = {Path(line.partition("::")[0]).name for line in done.stdout.splitlines() if "::" in line}
    assert {"test_gpu.py", "test_direct.py"} <= opened and "test_server.py" not in opened
